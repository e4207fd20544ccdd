//! Compiles the C++ shim (`shim/*.cpp`) against the libtorch that `torch-sys` found, and the CUDA plugin
//! (`cuda/*.cpp`), a library that becomes part of the binary and is opened only when a GPU is used. Without CUDA's
//! headers the plugin is empty.
//!
//! It also makes programs find libtorch without an environment variable. cargo adds the search path that is printed
//! here, because it is inside the target folder, to the library path of all that it runs (tests, doc tests, `cargo
//! run`). Other binaries get an rpath from their own build script, which reads `DEP_DRUMLINE_TORCH_LIB_DIR`.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    if env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        println!("cargo::rerun-if-changed=build.rs");
        // Nothing is linked, but the source names the plugin's file.
        return fs::write(plugin(), "").expect("OUT_DIR is writable");
    }
    let lib_dir = PathBuf::from(variable("DEP_TCH_LIBTORCH_LIB"));
    let libtorch = lib_dir.parent().expect("the library folder has a parent").to_owned();
    compiler(&libtorch).files(sources("shim")).compile("drumline_torch_shim");
    compile_plugin(&libtorch);
    println!("cargo::rustc-link-lib=torch_cpu");
    println!("cargo::rustc-link-lib=c10");
    println!("cargo::rustc-link-search=native={}", linked_into_target(&lib_dir).display());
    println!("cargo::metadata=lib_dir={}", lib_dir.display());
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("{name} is not set; try cargo xtask libtorch"))
}

fn compiler(libtorch: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(2).debug(false).include("shim");
    build.define("_GLIBCXX_USE_CXX11_ABI", "1").define("AT_PER_OPERATOR_HEADERS", None);
    // As libtorch itself was compiled: without it, `at::RecordFunction` has another layout.
    build.define("NDEBUG", None);
    for folder in ["include", "include/torch/csrc/api/include"] {
        build.flag("-isystem").flag(libtorch.join(folder));
    }
    build
}

/// The file of the CUDA plugin.
fn plugin() -> PathBuf {
    PathBuf::from(variable("OUT_DIR")).join("drumline_cuda.so")
}

/// Compiles the CUDA plugin. It is linked against nothing: its symbols are loaded before it
/// is opened.
fn compile_plugin(libtorch: &Path) {
    let plugin = plugin();
    let sources = sources("cuda");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    let Some(headers) = cuda_headers(libtorch) else {
        println!("cargo::warning=no CUDA headers: this build cannot use GPUs; try cargo xtask libtorch");
        return fs::write(plugin, "").expect("OUT_DIR is writable");
    };
    let mut compiler = compiler(libtorch);
    compiler.cargo_metadata(false).flag("-isystem").flag(headers).flag("-shared");
    let mut command = compiler.get_compiler().to_command();
    command.args(&sources).arg("-o").arg(&plugin);
    let status = command.status().expect("the C++ compiler can be started");
    assert!(status.success(), "the CUDA plugin was not compiled: {status}");
}

/// CUDA's headers: beside libtorch, where pip installs them, or in a CUDA toolkit.
fn cuda_headers(libtorch: &Path) -> Option<PathBuf> {
    let toolkit = env::var("CUDA_HOME").unwrap_or_else(|_| "/usr/local/cuda".to_owned());
    let folders = [libtorch.join("../nvidia/cu13/include"), Path::new(&toolkit).join("include")];
    let needed = ["cuda_runtime_api.h", "crt/host_defines.h"];
    folders.into_iter().find(|folder| needed.iter().all(|header| folder.join(header).is_file()))
}

fn sources(dir: &str) -> Vec<PathBuf> {
    println!("cargo::rerun-if-changed={dir}");
    let entries = fs::read_dir(dir).expect("the folder is part of the crate");
    let mut files: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "cpp"));
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
