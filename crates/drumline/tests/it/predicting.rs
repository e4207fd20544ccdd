//! Predictions of several ranks in one file.

use std::path::Path;

use drumline::ProcessGroup;
use drumline::comm::LocalGroup;
use drumline::data::{
    DistributedSampler, EvalSampler, Prediction, PredictionError, PredictionFault, PredictionOptions,
    PredictionWriter, SamplerOptions,
};

fn row(index: usize) -> Prediction {
    Prediction { index, cells: vec![(index as i64 * 2).into(), "a, b".into()] }
}

/// Writes the rows in batches. Returns the outcome of each rank.
fn write(
    path: &Path,
    options: &PredictionOptions,
    world: usize,
    rows: impl Fn(&ProcessGroup) -> Vec<Prediction> + Sync,
) -> Vec<Result<(), PredictionFault>> {
    let message = LocalGroup::run(world, |group| {
        let rows = rows(&group);
        let written = PredictionWriter::create(path, options, &group).and_then(|mut writer| {
            rows.chunks(3).try_for_each(|batch| writer.write(batch))?;
            writer.finish()
        });
        match written {
            Ok(()) => Ok(Ok(())),
            Err(PredictionError::Fault(fault)) => Ok(Err(fault)),
            Err(other) => panic!("{other}"),
        }
    });
    message.unwrap()
}

fn share(len: usize, group: &ProcessGroup) -> Vec<usize> {
    EvalSampler::new(len, group.size(), group.rank()).unwrap().indices()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn rows_of_all_ranks_come_once_and_in_order() {
    let folder = tempfile::tempdir().unwrap();
    for world in [1, 2, 3, 4] {
        for len in [0, 1, 2, 7, 40] {
            for reversed in [false, true] {
                let path = folder.path().join("out.jsonl");
                let options = PredictionOptions::json_lines(len, &["label", "text"]);
                let message = write(&path, &options, world, |group| {
                    let mut indices = share(len, group);
                    if reversed {
                        indices.reverse();
                    }
                    indices.into_iter().map(row).collect()
                });
                assert_eq!(message, vec![Ok(()); world]);
                let expected: String = (0..len)
                    .map(|i| format!("{{\"index\":{i},\"label\":{},\"text\":\"a, b\"}}\n", i * 2))
                    .collect();
                assert_eq!(std::fs::read_to_string(&path).unwrap(), expected, "{world} ranks, {len} samples");
                assert_eq!(names(folder.path()), ["out.jsonl"]);
            }
        }
    }
}

#[test]
fn faults_are_errors_on_all_ranks_and_leave_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.csv");
    std::fs::write(&path, "the one before").unwrap();
    let options = PredictionOptions::csv(7, &["label", "text"]);
    let message = |rows: &(dyn Fn(&ProcessGroup) -> Vec<Prediction> + Sync), options: &PredictionOptions| {
        let message = write(&path, options, 2, rows);
        assert_eq!(message[0], message[1], "both ranks");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "the one before");
        assert_eq!(names(folder.path()), ["out.csv"]);
        message[0].clone().unwrap_err()
    };
    let padded = |group: &ProcessGroup| {
        let (num_replicas, rank) = (group.size(), group.rank());
        let options =
            SamplerOptions { num_samples: 7, num_replicas, rank, shuffle: false, ..Default::default() };
        DistributedSampler::new(options).unwrap().indices(0).into_iter().map(row).collect()
    };
    assert_eq!(message(&padded, &options), PredictionFault::Duplicate { index: 0, rank: 1 });
    let some =
        |group: &ProcessGroup| share(7, group).into_iter().filter(|i| *i != 2 && *i != 5).map(row).collect();
    let missing = PredictionFault::Missing { count: 2, num_samples: 7, first: vec![2, 5] };
    assert_eq!(message(&some, &options), missing);
    let beyond = |group: &ProcessGroup| vec![row(6 + group.rank())];
    assert_eq!(message(&beyond, &options), PredictionFault::Outside { index: 7, rank: 1, num_samples: 7 });
    let short = |group: &ProcessGroup| match group.rank() {
        0 => vec![row(0)],
        _ => vec![Prediction { index: 1, cells: vec![1.into()] }],
    };
    assert_eq!(message(&short, &options), PredictionFault::Cells { index: 1, rank: 1, expected: 2, got: 1 });
    let late = |group: &ProcessGroup| share(7, group).into_iter().rev().map(row).collect();
    let narrow = PredictionOptions { max_waiting: 20, ..options.clone() };
    assert!(matches!(message(&late, &narrow), PredictionFault::TooFarAhead { index: 0, .. }));
}

#[test]
fn a_missing_folder_is_an_error_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nowhere/out.csv");
    let options = PredictionOptions::csv(4, &["label", "text"]);
    for message in write(&path, &options, 2, |group| share(4, group).into_iter().map(row).collect()) {
        let message = message.unwrap_err().to_string();
        assert!(
            message.contains("rank 0 cannot write") && message.contains("nowhere/out.csv: No such file"),
            "{message}"
        );
    }
}

#[test]
fn given_up_it_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.csv");
    LocalGroup::run(2, |group| {
        let options = PredictionOptions::csv(4, &["label", "text"]);
        let mut writer = PredictionWriter::create(&path, &options, &group).unwrap();
        writer.write(&[row(group.rank())]).unwrap();
        if group.rank() == 0 {
            let beside = names(folder.path());
            assert!(
                beside.len() == 1 && beside != ["out.csv"],
                "the control: it was being written: {beside:?}"
            );
        }
        drop(writer);
        Ok(())
    })
    .unwrap();
    assert!(names(folder.path()).is_empty());
}
