module github.com/kvasir-project/kvasir/bindings/go

go 1.23
