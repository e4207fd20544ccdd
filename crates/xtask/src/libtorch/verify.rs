//! Whether a folder holds the whole of the pinned libtorch: version, libraries, headers.

use super::{Kind, VERSION};
use std::fs;
use std::path::Path;

const LIBRARIES_AND_HEADERS: &[&str] = &[
    "lib/libtorch_cpu.so",
    "lib/libc10.so",
    "include/ATen/ATen.h",
    "include/c10/core/TensorImpl.h",
    "include/torch/csrc/api/include/torch/torch.h",
];
/// Beside `torch/`, found by the libraries' own search path.
const BESIDE: &[&str] = &[
    "nvidia/cu13/lib/libcudart.so.13",
    "nvidia/cu13/lib/libcupti.so.13",
    "nvidia/cu13/include/cuda_runtime_api.h",
    "nvidia/cu13/include/crt/host_defines.h",
];
const CUDA: &[&str] = &[
    "torch/lib/libtorch_cuda.so",
    "torch/lib/libc10_cuda.so",
    "nvidia/cu13/lib/libcublas.so.13",
    "nvidia/cudnn/lib/libcudnn.so.9",
    "nvidia/nccl/lib/libnccl.so.2",
];

/// What is wrong with a folder that pip made (`torch/` and `nvidia/` side by side).
pub(crate) fn site_folder(site: &Path, kind: Kind) -> Vec<String> {
    let mut problems = torch_folder(&site.join("torch"));
    problems.extend(missing(site, BESIDE));
    if kind == Kind::Cuda {
        problems.extend(missing(site, CUDA));
    }
    problems
}

/// What is wrong with a folder that `LIBTORCH` may point to.
pub(crate) fn torch_folder(torch: &Path) -> Vec<String> {
    let mut problems = missing(torch, LIBRARIES_AND_HEADERS);
    match version(torch) {
        Some(found) if is_pinned(&found) => {}
        Some(found) => problems.push(format!("it is version {found}, expected {VERSION}")),
        None => problems.push("its version is not known".to_owned()),
    }
    problems
}

fn missing(folder: &Path, files: &[&str]) -> Vec<String> {
    files
        .iter()
        .filter(|file| !folder.join(file).is_file())
        .map(|file| format!("{file} is missing"))
        .collect()
}

/// From `version.py` of the Python package, or `build-version` of the C++ archive.
fn version(torch: &Path) -> Option<String> {
    if let Ok(text) = fs::read_to_string(torch.join("version.py")) {
        let value = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
        return Some(value.trim_matches(['\'', '"']).to_owned());
    }
    let text = fs::read_to_string(torch.join("build-version")).ok()?;
    Some(text.trim().to_owned())
}

/// `2.11.0` or `2.11.0+cu130`, not `2.11.01`.
fn is_pinned(version: &str) -> bool {
    version.split('+').next() == Some(VERSION)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn site(name: &str, version: &str) -> PathBuf {
        let site = std::env::temp_dir().join(format!("xtask-verify-{name}-{}", std::process::id()));
        let inside_torch = LIBRARIES_AND_HEADERS.iter().map(|file| format!("torch/{file}"));
        for file in inside_torch.chain(BESIDE.iter().map(|file| (*file).to_owned())) {
            let path = site.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        fs::write(site.join("torch/version.py"), format!("__all__ = []\n__version__ = '{version}'\n"))
            .unwrap();
        site
    }

    #[test]
    fn a_whole_folder_passes() {
        let site = site("whole", "2.11.0+cu130");
        assert_eq!(site_folder(&site, Kind::Cpu), Vec::<String>::new());
        assert_eq!(site_folder(&site, Kind::Cuda).len(), CUDA.len());
        fs::remove_dir_all(&site).unwrap();
    }

    #[test]
    fn a_missing_file_and_another_version_are_named() {
        let site = site("broken", "2.11.1");
        fs::remove_file(site.join("torch/lib/libc10.so")).unwrap();
        let expected = ["lib/libc10.so is missing", "it is version 2.11.1, expected 2.11.0"];
        assert_eq!(site_folder(&site, Kind::Cpu), expected);
        fs::remove_dir_all(&site).unwrap();
    }

    #[test]
    fn an_empty_folder_does_not_pass() {
        assert!(!torch_folder(Path::new("/nonexistent")).is_empty());
    }
}
