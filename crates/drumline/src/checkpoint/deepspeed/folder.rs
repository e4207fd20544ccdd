//! The files of a checkpoint, by their names.
//!
//! ```text
//!   mp_rank_00_model_states.pt                              stages 0 to 2
//!   zero_pp_rank_3_mp_rank_00_model_states.pt               stage 3, rank 3
//!   [bf16_|fp16_]zero_pp_rank_3_mp_rank_00_optim_states.pt  rank 3
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use super::super::tag::{self, LATEST};
use super::error::DeepSpeedError;

type Result<T = ()> = std::result::Result<T, DeepSpeedError>;

const MODEL: &str = "_model_states.pt";
const OPTIMIZER: &str = "_optim_states.pt";

/// The files of one save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Folder {
    /// The folder of the tag.
    pub(super) path: PathBuf,
    pub(super) tag: String,
    /// In the order of ranks; one for all ranks up to stage 2.
    pub(super) model: Vec<PathBuf>,
    /// In the order of ranks; none without ZeRO.
    pub(super) optimizer: Vec<PathBuf>,
}

/// What the name of a file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Name {
    kind: Kind,
    /// The rank among data-parallel ranks; 0 in a file for all of them.
    rank: usize,
    /// The rank among those of tensor parallelism.
    model_rank: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Model,
    Optimizer,
}

impl Folder {
    /// Finds the files of a tag; by default that of `latest`. `dir` may be the folder of the tag itself.
    pub(super) fn find(dir: &Path, tag: Option<&str>) -> Result<Self> {
        let (path, tag) = match tag {
            Some(name) => (dir.join(tag::checked(name)?), name.to_owned()),
            None => tagged(dir)?,
        };
        let names = names(&path)?;
        refuse_other_kinds(&path, &names)?;
        let files = |kind| {
            let own = names.iter().filter_map(|name| Some((parse(name)?, name)));
            let mut own: Vec<_> = own.filter(|(name, _)| name.kind == kind).collect();
            own.sort_by_key(|(name, _)| name.rank);
            let is_complete = own.iter().enumerate().all(|(place, (name, _))| name.rank == place);
            let paths: Vec<_> = own.iter().map(|(_, name)| path.join(name)).collect();
            if is_complete {
                return Ok(paths);
            }
            let expected = own.last().map_or(0, |(name, _)| name.rank + 1);
            Err(DeepSpeedError::Incomplete { dir: path.clone(), found: paths.len(), expected })
        };
        let (model, optimizer) = (files(Kind::Model)?, files(Kind::Optimizer)?);
        if model.is_empty() {
            return Err(DeepSpeedError::NotFound {
                what: format!("it has no file that ends in {MODEL}"),
                advice: "the folder that was given to save_checkpoint".into(),
                dir: path,
            });
        }
        Ok(Self { path, tag, model, optimizer })
    }
}

/// The folder and tag that `latest` names, or this folder itself.
fn tagged(dir: &Path) -> Result<(PathBuf, String)> {
    match tag::latest(dir).map_err(DeepSpeedError::io(&dir.join(LATEST)))? {
        Some(tag) => Ok((dir.join(tag::checked(&tag)?), tag)),
        None => without_latest(dir),
    }
}

/// A folder without `latest`: that of a tag, or an error that lists the tags in it.
fn without_latest(dir: &Path) -> Result<(PathBuf, String)> {
    let has_files =
        |path: &Path| names(path).is_ok_and(|names| names.iter().any(|name| parse(name).is_some()));
    if has_files(dir) {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Ok((dir.to_owned(), name));
    }
    let mut tags: Vec<_> = names(dir)?.into_iter().filter(|name| has_files(&dir.join(name))).collect();
    tags.sort();
    let advice = if tags.is_empty() {
        "the folder that was given to save_checkpoint".to_owned()
    } else {
        format!("--tag with one of {}", tags.join(", "))
    };
    Err(DeepSpeedError::NotFound { dir: dir.to_owned(), what: format!("it has no `{LATEST}`"), advice })
}

fn names(dir: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(dir).map_err(DeepSpeedError::io(dir))?;
    let name = |entry: std::io::Result<fs::DirEntry>| {
        Ok(entry.map_err(DeepSpeedError::io(dir))?.file_name().to_string_lossy().into_owned())
    };
    entries.map(name).collect()
}

fn parse(name: &str) -> Option<Name> {
    let (kind, rest) = match name.strip_suffix(MODEL) {
        Some(rest) => (Kind::Model, rest),
        None => (Kind::Optimizer, name.strip_suffix(OPTIMIZER)?),
    };
    let rest = rest.strip_prefix("bf16_").or_else(|| rest.strip_prefix("fp16_")).unwrap_or(rest);
    let (rank, rest) = match rest.strip_prefix("zero_pp_rank_") {
        Some(rest) => rest.split_once('_')?,
        None => ("0", rest),
    };
    let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?;
    Some(Name { kind, rank: number(rank)?, model_rank: number(rest.strip_prefix("mp_rank_")?)? })
}

/// Returns an error for a checkpoint whose parts are not those of data-parallel ranks.
fn refuse_other_kinds(dir: &Path, names: &[String]) -> Result {
    let unsupported = |name: &String, what: &str| {
        let advice = "DeepSpeed's own tools to merge it first, such as ds_to_universal.py";
        Err(DeepSpeedError::Unsupported { path: dir.join(name), what: what.to_owned(), advice })
    };
    for name in names {
        let is_state = name.ends_with(MODEL) || name.ends_with(OPTIMIZER);
        match parse(name) {
            Some(Name { model_rank: 1.., .. }) => {
                return unsupported(name, "it is of a tensor parallel training");
            }
            None if is_state && name.contains("expert") => {
                return unsupported(name, "it is of a mixture of experts");
            }
            None if is_state || name.starts_with("layer_") => {
                return unsupported(name, "it is of a pipeline, or of another kind of training");
            }
            _ => (),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "global_step2\n").unwrap();
        }
        folder
    }

    const STAGE_3: [&str; 5] = [
        "latest",
        "global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt",
        "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt",
        "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ];

    #[test]
    fn files_are_found_in_the_order_of_ranks() {
        let dir = folder(&STAGE_3);
        let by_latest = Folder::find(dir.path(), None).unwrap();
        assert_eq!((by_latest.tag.as_str(), by_latest.model.len()), ("global_step2", 2));
        assert!(by_latest.optimizer[1].ends_with("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"));
        assert_eq!(Folder::find(dir.path(), Some("global_step2")).unwrap(), by_latest);
        assert_eq!(Folder::find(&dir.path().join("global_step2"), None).unwrap(), by_latest);
    }

    #[test]
    fn ranks_are_numbers() {
        let dir = folder(&[]);
        let many: Vec<_> =
            (0..12).map(|rank| format!("t/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")).collect();
        for file in many.iter().map(String::as_str).chain(["t/mp_rank_00_model_states.pt"]) {
            fs::create_dir_all(dir.path().join("t")).unwrap();
            fs::write(dir.path().join(file), "").unwrap();
        }
        let found = Folder::find(dir.path(), Some("t")).unwrap();
        assert!(
            found.optimizer[2].ends_with("zero_pp_rank_2_mp_rank_00_optim_states.pt"),
            "2 comes before 10"
        );
        fs::remove_file(dir.path().join(&many[5])).unwrap();
        let message = Folder::find(dir.path(), Some("t")).unwrap_err().to_string();
        assert!(message.contains("has the files of 11 ranks, expected 12"), "{message}");
    }

    #[test]
    fn a_missing_latest_lists_the_tags() {
        let message = |dir: &Path, tag| Folder::find(dir, tag).unwrap_err().to_string();
        let dir = folder(&STAGE_3[1..]);
        assert!(
            message(dir.path(), None).ends_with("it has no `latest`; try --tag with one of global_step2")
        );
        assert!(
            message(folder(&[]).path(), None).ends_with("try the folder that was given to save_checkpoint")
        );
        assert!(message(dir.path(), Some("../x")).contains("`../x` is no tag"));
        assert!(message(dir.path(), Some("")).contains("is no tag"));
        assert!(message(dir.path(), Some("global_step3")).contains("global_step3: No such file"));
    }

    #[test]
    fn other_parallelism_is_refused() {
        for (file, expected) in [
            ("mp_rank_01_model_states.pt", "tensor parallel"),
            ("layer_00-model_00-model_states.pt", "pipeline"),
            ("layer_1_expert_0_mp_rank_00_model_states.pt", "mixture of experts"),
        ] {
            let dir = folder(&["t/mp_rank_00_model_states.pt", &format!("t/{file}")]);
            let message = Folder::find(dir.path(), Some("t")).unwrap_err().to_string();
            assert!(message.contains(expected) && message.contains("; try DeepSpeed's own"), "{message}");
        }
    }
}
