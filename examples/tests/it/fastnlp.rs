//! fastNLP's script on texts, on one rank and on two.

use super::started::{as_ranks, numbers_after};

#[test]
fn the_script_learns_and_only_the_master_speaks() {
    for (ranks, batch_size, update) in [(1, 32, 1), (2, 8, 2)] {
        let folder = tempfile::tempdir().unwrap();
        let save = folder.path().join("save");
        let words = format!("--batch-size {batch_size} --update {update} --save {}", save.display());
        let args = words.split_whitespace().map(str::to_owned).collect();
        let said = as_ranks(ranks, env!("CARGO_BIN_EXE_fastnlp"), args);
        let best = numbers_after(&said[0], "best acc: ");
        assert!(best[0] > 0.95, "{}", said[0]);
        assert!(said[0].contains(" of 470\n"), "94 steps of 32 texts, five times: {}", said[0]);
        assert!(said[1..].iter().all(String::is_empty), "only the master speaks: {said:?}");
        let log = std::fs::read_to_string(save.join("fitlog.txt")).unwrap();
        assert_eq!(log.lines().count(), 5, "{log}");
        assert!(save.join("vocab.json").is_file() && save.join("best/model.safetensors").is_file());
    }
}
