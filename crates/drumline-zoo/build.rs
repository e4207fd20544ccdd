//! Lets `drumline-train` find libtorch when it is run by itself, with no variable to set.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        return;
    }
    let lib_dir = std::env::var("DEP_DRUMLINE_TORCH_LIB_DIR").expect("drumline-torch says where libtorch is");
    println!("cargo::rustc-link-arg-bins=-Wl,-rpath,{lib_dir}");
}
