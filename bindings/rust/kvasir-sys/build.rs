//! Finds libkvasir, or builds it. In this order:
//!
//! 1. the feature `vendored`: built from source;
//! 2. `KVASIR_LIB_DIR`: the folder of libkvasir.so or libkvasir.a;
//! 3. pkg-config (`PKG_CONFIG` names another program) finds `kvasir`;
//! 4. built from source: `KVASIR_SOURCE`, the copy in the package, or the repository of this crate.
//!
//! A library that is built from source is linked statically; one that is found only with the
//! feature `static`.
use std::env;
use std::path::{Path, PathBuf};
use std::process::{exit, Command};

/// Libraries that libkvasir.a needs. mimalloc also defines malloc, and the first library that
/// defines it wins: mimalloc comes after the C library, so a program keeps its own malloc.
const PRIVATE: [&str; 7] = ["stdc++", "m", "c", "mimalloc", "zstd", "pcre2-8", "pthread"];
/// While major is 0, another minor version is another ABI.
const VERSIONS: [&str; 2] = ["kvasir >= 0.2.0", "kvasir < 0.3.0"];
const SOURCES: [&str; 5] = ["include", "kernels", "src", "meson.build", "meson_options.txt"];

fn main() {
    for name in ["KVASIR_LIB_DIR", "KVASIR_SOURCE", "PKG_CONFIG", "PKG_CONFIG_PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("DOCS_RS").is_some() {
        return; // documentation needs no library
    }
    let has = |feature: &str| env::var_os(format!("CARGO_FEATURE_{feature}")).is_some();
    let is_static = has("STATIC");
    let result = if has("VENDORED") {
        build()
    } else if let Some(folder) = env::var_os("KVASIR_LIB_DIR") {
        println!("cargo:rustc-link-search=native={}", Path::new(&folder).display());
        if is_static {
            let archive = Path::new(&folder).join("libkvasir.a");
            println!("cargo:rerun-if-changed={}", archive.display());
        }
        link(is_static);
        Ok(())
    } else {
        find(is_static).or_else(|why| {
            println!(
                "cargo:warning=builds libkvasir from source, because no installed one was found \
                 ({why}). If there is one, set PKG_CONFIG_PATH to the folder of kvasir.pc."
            );
            build().map_err(|failure| format!("no installed libkvasir ({why}), and {failure}"))
        })
    };
    if let Err(message) = result {
        eprintln!("kvasir-sys: {message}");
        exit(1);
    }
}

fn link(is_static: bool) {
    if is_static {
        println!("cargo:rustc-link-lib=static=kvasir");
        for name in PRIVATE {
            println!("cargo:rustc-link-lib={name}");
        }
    } else {
        println!("cargo:rustc-link-lib=dylib=kvasir");
    }
}

/// Links the library that pkg-config finds.
fn find(is_static: bool) -> Result<(), String> {
    let program = env::var_os("PKG_CONFIG");
    if program.is_none() && env::var("HOST") != env::var("TARGET") {
        return Err("PKG_CONFIG names no pkg-config for the target".into());
    }
    let mut command = Command::new(program.unwrap_or_else(|| "pkg-config".into()));
    command.args(["--libs-only-L", "--print-errors"]);
    if is_static {
        command.arg("--static");
    }
    command.args(VERSIONS);
    // Otherwise pkg-config leaves out the system's folders, which the linker of another target may
    // not know.
    command.env("PKG_CONFIG_ALLOW_SYSTEM_LIBS", "1");
    let output = command.output().map_err(|e| format!("pkg-config: {e}"))?;
    if !output.status.success() {
        return Err(first_line(&output.stderr));
    }
    let flags = String::from_utf8(output.stdout).map_err(|e| format!("pkg-config: {e}"))?;
    let flags = format!(" {flags}");
    for folder in flags.split(" -L").map(str::trim).filter(|folder| !folder.is_empty()) {
        println!("cargo:rustc-link-search=native={}", folder.replace("\\ ", " "));
    }
    link(is_static);
    Ok(())
}

/// The first line, such as "Package kvasir was not found in the pkg-config search path."
fn first_line(text: &[u8]) -> String {
    String::from_utf8_lossy(text).trim().lines().next().unwrap_or("pkg-config failed").to_string()
}

/// The folder with meson.build.
fn source() -> Result<PathBuf, String> {
    if let Some(folder) = env::var_os("KVASIR_SOURCE") {
        let folder = PathBuf::from(folder);
        return if folder.join("include/kvasir.h").is_file() {
            Ok(folder)
        } else {
            Err(format!("KVASIR_SOURCE: {} is not Kvasir's source", folder.display()))
        };
    }
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut places = vec![here.join("vendor"), here.join("../../..")].into_iter();
    places
        .find(|folder| folder.join("include/kvasir.h").is_file())
        .ok_or_else(|| "the crate has no source of the library: set KVASIR_SOURCE".into())
}

/// Builds with meson and ninja in cargo's own folder. Writes nothing into the source.
fn build() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let source = source()?;
    for part in SOURCES {
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
    let advice = "kvasir-sys/README.md lists what a build needs; tools/setup installs it";
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{command:?} failed: {status}; {advice}")),
        Err(error) => Err(format!("{command:?}: {error}; {advice}")),
    }
}
