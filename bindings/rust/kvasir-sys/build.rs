//! Finds libkvasir, or builds it. In this order:
//!
//! 1. the feature `vendored`: built from source;
//! 2. `KVASIR_LIB_DIR`: the folder of libkvasir.so or libkvasir.a;
//! 3. pkg-config, asked for `kvasir` (`PKG_CONFIG` names another program);
//! 4. built from source: the repository around this crate, or the one that `KVASIR_SOURCE` names.
//!
//! A library that is built from source is linked statically, one that is found only with the feature `static`.
use std::env;
use std::path::{Path, PathBuf};
use std::process::{exit, Command};

/// What libkvasir.a needs besides itself. mimalloc also defines malloc, and the first library that does wins: it comes after the C
/// library, so that a program keeps its own.
const PRIVATE: [&str; 7] = ["stdc++", "m", "c", "mimalloc", "zstd", "pcre2-8", "pthread"];
const LEAST_VERSION: &str = "0.1.0";

fn main() {
    for name in ["KVASIR_LIB_DIR", "KVASIR_SOURCE", "PKG_CONFIG", "PKG_CONFIG_PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("DOCS_RS").is_some() {
        return; // documentation needs no library
    }
    let wanted = |feature: &str| env::var_os(format!("CARGO_FEATURE_{feature}")).is_some();
    let result = if wanted("VENDORED") {
        build()
    } else if let Some(folder) = env::var_os("KVASIR_LIB_DIR") {
        println!("cargo:rustc-link-search=native={}", Path::new(&folder).display());
        if wanted("STATIC") {
            println!("cargo:rerun-if-changed={}", Path::new(&folder).join("libkvasir.a").display());
        }
        link(wanted("STATIC"));
        Ok(())
    } else {
        ask_pkg_config(wanted("STATIC")).or_else(|why| build().map_err(|failure| format!("no installed libkvasir ({why}), and {failure}")))
    };
    if let Err(message) = result {
        eprintln!("kvasir-sys: {message}");
        exit(1);
    }
}

fn link(statically: bool) {
    if statically {
        println!("cargo:rustc-link-lib=static=kvasir");
        for name in PRIVATE {
            println!("cargo:rustc-link-lib={name}");
        }
    } else {
        println!("cargo:rustc-link-lib=dylib=kvasir");
    }
}

/// The folders that pkg-config names for libkvasir; the library itself is named by `link`.
fn ask_pkg_config(statically: bool) -> Result<(), String> {
    let program = env::var_os("PKG_CONFIG");
    if program.is_none() && env::var("HOST") != env::var("TARGET") {
        return Err("PKG_CONFIG names no pkg-config for the target".into());
    }
    let mut command = Command::new(program.unwrap_or_else(|| "pkg-config".into()));
    command.args(["--libs-only-L", "--print-errors"]);
    if statically {
        command.arg("--static");
    }
    command.arg(format!("kvasir >= {LEAST_VERSION}"));
    // Without this, pkg-config leaves out the system's folders, which the linker of another target may not know.
    command.env("PKG_CONFIG_ALLOW_SYSTEM_LIBS", "1");
    let output = command.output().map_err(|e| format!("pkg-config: {e}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; "));
    }
    let flags = String::from_utf8(output.stdout).map_err(|e| format!("pkg-config: {e}"))?;
    for folder in format!(" {flags}").split(" -L").map(str::trim).filter(|folder| !folder.is_empty()) {
        println!("cargo:rustc-link-search=native={}", folder.replace("\\ ", " "));
    }
    link(statically);
    Ok(())
}

/// meson and ninja, in cargo's own folder; nothing is written beside the source.
fn build() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let source = match env::var_os("KVASIR_SOURCE") {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.."),
    };
    if !source.join("include/kvasir.h").is_file() {
        return Err(format!("{} is not Kvasir's source: KVASIR_SOURCE names it", source.display()));
    }
    for part in ["include", "kernels", "src", "meson.build", "meson_options.txt"] {
        println!("cargo:rerun-if-changed={}", source.join(part).display());
    }
    let (tree, prefix) = (out.join("build"), out.join("install"));
    if !tree.join("build.ninja").is_file() {
        let mut setup = Command::new("meson");
        setup.arg("setup").arg(&tree).arg(&source).arg("--prefix").arg(&prefix);
        setup.args(["--libdir=lib", "--buildtype=release", "--wrap-mode=nodownload"]);
        setup.args(["-Ddefault_library=static", "-Dtools=false", "-Dtests=false"]);
        run(&mut setup)?;
    }
    let jobs = env::var("NUM_JOBS").unwrap_or_else(|_| "1".into());
    run(Command::new("ninja").arg("-C").arg(&tree).args(["-j", &jobs, "install"]))?;
    println!("cargo:rustc-link-search=native={}", prefix.join("lib").display());
    println!("cargo:include={}", prefix.join("include").display());
    link(true);
    Ok(())
}

fn run(command: &mut Command) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{command:?} failed: {status}; tools/setup installs what a build needs")),
        Err(error) => Err(format!("{command:?}: {error}; tools/setup installs what a build needs")),
    }
}
