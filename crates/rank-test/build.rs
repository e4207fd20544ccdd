//! For tests that need a GPU: compiles the stand-in for NCCL (`nccl_stand_in`), which becomes part of the test program.
//! So the machine with the GPU needs no compiler.

use std::env;
use std::path::{Path, PathBuf};

const SOURCES: &str = "nccl_stand_in";

fn main() {
    println!("cargo::rerun-if-changed={SOURCES}");
    if env::var_os("CARGO_FEATURE_NCCL_STAND_IN").is_some() {
        compile_stand_in();
    }
}

/// It is not linked against anything: CUDA's functions are already loaded when it is opened. Its own symbols take
/// precedence over those of the real NCCL, which libtorch loads globally.
fn compile_stand_in() {
    let library = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("libnccl_stand_in.so");
    let mut compiler = cc::Build::new();
    compiler.cpp(true).std("c++17").opt_level(2).debug(false).warnings(true).warnings_into_errors(true);
    compiler.cargo_metadata(false).flag("-shared").flag("-Wl,-Bsymbolic");
    let mut command = compiler.get_compiler().to_command();
    command.args(["exchange.cpp", "nccl.cpp", "reduce.cpp"].map(|file| Path::new(SOURCES).join(file)));
    let status = command.arg("-o").arg(&library).status().expect("the C++ compiler can be started");
    assert!(status.success(), "the stand-in for NCCL was not compiled: {status}");
}
