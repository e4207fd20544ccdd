//! Tags and `latest`; a training that resumes is the one that never stopped.

use rank_test::ranks_test;

use super::super::trainer::{FOLDER, difference, folder, weights};
use super::*;

fn zero(stage: u8) -> Value {
    config(json!({
        "zero_optimization": { "stage": stage },
        "scheduler": { "type": "WarmupLR", "params": { "warmup_num_steps": 5, "warmup_min_lr": 0.01, "warmup_max_lr": 0.05 } },
    }))
}

ranks_test!(
    a_training_resumes_with_the_same_bits,
    2,
    {
        let group = ProcessGroup::from_env()?;
        for stage in 0..=3 {
            let dir = folder()?.join(stage.to_string());
            let (straight, mut engine_1) = engine(&group, &zero(stage))?;
            micro_steps(&mut engine_1, 0..4)?;
            let path = engine_1.save_checkpoint(&dir, None, &json!({ "epoch": 7 }))?;
            assert!(path.ends_with("global_step2/step-00000002"), "{}", path.display());
            assert_eq!(std::fs::read_to_string(dir.join("latest"))?, "global_step2");
            micro_steps(&mut engine_1, 4..8)?;
            engine_1.save_checkpoint(&dir, Some("last"), &Value::Null)?;
            let (resumed, mut engine_2) = engine(&group, &zero(stage))?;
            let loaded = engine_2.load_checkpoint(&dir, Some("global_step2"))?.unwrap();
            assert_eq!((loaded.tag.as_str(), &loaded.client_state), ("global_step2", &json!({ "epoch": 7 })));
            assert_eq!((engine_2.global_steps(), engine_2.micro_steps()), (2, 4));
            micro_steps(&mut engine_2, 4..8)?;
            assert_eq!(difference(&weights(&straight), &weights(&resumed)), 0.0, "stage {stage}");
            assert_eq!(engine_1.get_lr(), engine_2.get_lr());
            let loaded = engine_2.load_checkpoint(&dir, None)?.unwrap();
            assert_eq!((loaded.tag.as_str(), &loaded.client_state), ("last", &Value::Null));
        }
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        ranks.env([(FOLDER, folder.path())]).pass()?;
    }
);

ranks_test!(
    another_number_of_ranks_resumes,
    2,
    {
        let group = ProcessGroup::from_env()?;
        for stage in [0, 1, 2, 3] {
            let dir = folder()?.join(stage.to_string());
            let (store, mut engine) = engine(&group, &zero(stage))?;
            match group.size() {
                2 => {
                    micro_steps(&mut engine, 0..4)?;
                    engine.save_checkpoint(&dir, None, &Value::Null)?;
                }
                _ => {
                    let before = weights(&store);
                    assert_eq!(engine.load_checkpoint(&dir, None)?.unwrap().tag, "global_step2");
                    assert_eq!(engine.global_steps(), 2);
                    assert!(difference(&before, &weights(&store)) > 0.0);
                    micro_steps(&mut engine, 4..6)?;
                }
            }
        }
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        let ranks = ranks.env([(FOLDER, folder.path())]);
        ranks.pass()?;
        ranks.nproc(1).pass()?;
    }
);

ranks_test!(
    tags_are_checked,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let dir = folder()?;
        let own = format!("rank{}", group.rank());
        for validation in ["Fail", "Warn", "Ignore"] {
            let config = config(json!({ "checkpoint": { "tag_validation": validation } }));
            let (_store, engine) = engine(&group, &config)?;
            match engine.save_checkpoint(&dir, Some(&own), &Value::Null) {
                Ok(path) => assert!(validation != "Fail" && path.to_str().unwrap().contains("/rank0/")),
                Err(error) => {
                    let said = error.to_string();
                    assert!(
                        validation == "Fail" && said.contains("rank 1 saves under the tag `rank1`"),
                        "{said}"
                    );
                    assert!(!dir.join("rank0").exists(), "nothing was written");
                }
            }
            let said = engine.save_checkpoint(&dir, Some("../other"), &Value::Null).unwrap_err().to_string();
            assert!(said.contains("`../other` is no tag"), "{said}");
        }
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        ranks.env([(FOLDER, folder.path())]).pass()?;
    }
);

ranks_test!(
    what_is_missing_or_half_done_is_not_loaded_or_saved,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let dir = folder()?;
        let (store, mut engine) = engine(&group, &zero(1))?;
        assert_eq!(engine.load_checkpoint(&dir, None)?, None, "no latest");
        let said = engine.load_checkpoint(&dir, Some("global_step9")).unwrap_err().to_string();
        assert!(said.contains("global_step9; try a tag that was saved there"), "{said}");
        micro_steps(&mut engine, 0..3)?;
        let before = weights(&store);
        let said = engine.save_checkpoint(&dir, None, &Value::Null).unwrap_err().to_string();
        assert!(said.contains("within a window would lose its gradients"), "{said}");
        assert!(!dir.join("latest").exists());
        let said = engine.load_checkpoint(&dir, None).unwrap_err().to_string();
        assert!(said.contains("would mix its gradients"), "{said}");
        micro_steps(&mut engine, 3..4)?;
        engine.save_checkpoint(&dir, None, &Value::Null)?;
        assert!(difference(&before, &weights(&store)) > 0.0);
        if group.rank() == 0 {
            std::fs::write(dir.join("latest"), "global_step1")?;
        }
        group.barrier()?;
        let said = engine.load_checkpoint(&dir, None).unwrap_err().to_string();
        assert!(said.contains("no checkpoint in") && said.contains("global_step1"), "{said}");
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        ranks.env([(FOLDER, folder.path())]).pass()?;
    }
);
