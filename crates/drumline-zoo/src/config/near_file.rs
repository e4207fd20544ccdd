//! Suggests configuration files that exist for one that does not.

use std::path::{Path, PathBuf};

/// The folder in which a repository has its configurations.
const USUAL: &str = "config";

/// Similarity from which a file's name counts as a typing mistake of another; 1 is equal.
const SIMILAR: f64 = 0.7;

/// `; try …`: the file that was probably meant, or those that exist.
pub(super) fn advice(missing: &Path) -> String {
    let folder = missing.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let own = if missing.is_dir() { missing } else { folder };
    let files: Vec<_> =
        [own, Path::new("."), Path::new(USUAL)].into_iter().flat_map(configurations).collect();
    let name = stem(missing);
    let score = |file: &PathBuf| strsim::normalized_damerau_levenshtein(&name, &stem(file));
    let best = files.iter().max_by(|a, b| score(a).total_cmp(&score(b)));
    let Some(best) = best else { return "; try the path of a YAML file".to_owned() };
    if score(best) >= SIMILAR {
        return format!("; try {}", best.display());
    }
    let folder = files[0].parent().unwrap_or(Path::new("."));
    let here = files.iter().filter(|file| file.parent() == Some(folder));
    let mut names: Vec<_> = here.filter_map(|file| Some(file.file_name()?.to_string_lossy())).collect();
    names.sort();
    names.dedup();
    format!("; try one of those in {}: {}", shown(folder), names.join(", "))
}

/// The YAML files of a folder.
fn configurations(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| folder.join(entry.file_name()));
    let paths = paths.map(|path| path.strip_prefix(".").map(Path::to_owned).unwrap_or(path));
    paths.filter(|path| path.extension().is_some_and(|end| end == "yaml" || end == "yml")).collect()
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().to_lowercase()
}

fn shown(folder: &Path) -> String {
    if folder.as_os_str().is_empty() { "this folder".to_owned() } else { folder.display().to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_that_was_meant_or_those_that_exist() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["cifar-resnet18.yaml", "gpt.yml", "notes.txt"] {
            std::fs::write(path(name), "").unwrap();
        }
        let meant = format!("; try {}", path("cifar-resnet18.yaml").display());
        for typed in ["cifar-resnet.yaml", "cifar-resnet18", "cifar-resnet18.yml", "Cifar_resnet18.yaml"] {
            assert_eq!(advice(&path(typed)), meant, "{typed}");
        }
        let all = format!("; try one of those in {}: cifar-resnet18.yaml, gpt.yml", folder.path().display());
        assert_eq!(advice(&path("nosuch.yaml")), all);
        assert_eq!(advice(folder.path()), all, "a folder instead of a file");
    }
}
