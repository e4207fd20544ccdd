//! Lets `drumline-bench` find libtorch when it is run by itself, with no variable to set.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let lib_dir = std::env::var("DEP_DRUMLINE_TORCH_LIB_DIR").expect("drumline-torch says where libtorch is");
    println!("cargo::rustc-link-arg-bins=-Wl,-rpath,{lib_dir}");
}
