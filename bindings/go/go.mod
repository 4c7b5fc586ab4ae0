module kvasir

go 1.23
