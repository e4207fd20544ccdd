//! Compiles the C++ shim (`shim/*.cpp`) against the libtorch that `torch-sys` found.
//!
//! Also makes programs find libtorch with no variable to set: cargo puts the search path printed here, as it lies inside
//! the target folder, on the library path of all it runs (tests, doc tests, `cargo run`); binaries that are run by themselves get an rpath from
//! their own build script, which reads `DEP_DRUMLINE_TORCH_LIB_DIR`.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let lib_dir = PathBuf::from(variable("DEP_TCH_LIBTORCH_LIB"));
    let libtorch = lib_dir.parent().expect("the library folder lies in libtorch's").to_owned();
    let mut sources: Vec<PathBuf> = files("shim");
    println!("cargo::rerun-if-changed=shim");
    sources.retain(|path| path.extension().is_some_and(|ending| ending == "cpp"));
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .define("AT_PER_OPERATOR_HEADERS", None)
        .flag("-isystem")
        .flag(libtorch.join("include").display().to_string())
        .flag("-isystem")
        .flag(libtorch.join("include/torch/csrc/api/include").display().to_string())
        .include("shim")
        .opt_level(2)
        .debug(false)
        .files(&sources)
        .compile("drumline_torch_shim");
    println!("cargo::rustc-link-lib=torch_cpu");
    println!("cargo::rustc-link-lib=c10");
    println!("cargo::rustc-link-search=native={}", linked_into_target(&lib_dir).display());
    println!("cargo::metadata=lib_dir={}", lib_dir.display());
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("{name} is not set; try cargo xtask libtorch"))
}

fn files(dir: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).expect("the shim's folder is part of the crate");
    let mut files: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.sort();
    files
}

/// A link to libtorch's library folder inside the target folder.
fn linked_into_target(lib_dir: &Path) -> PathBuf {
    let link = PathBuf::from(variable("OUT_DIR")).join("libtorch");
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(lib_dir, &link).expect("OUT_DIR is writable");
    link
}
