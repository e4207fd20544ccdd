//! fastNLP's script, on one rank and on two.

use super::started::{Data, as_ranks, numbers_after};

#[test]
fn the_trainer_trains_evaluates_and_saves() {
    let data = Data::new(320, 50);
    for (ranks, batch_size, update) in [(1, 32, 1), (2, 8, 2)] {
        let save = data.path().join(format!("save-{ranks}"));
        let words = format!(
            "--arch mlp --epochs 3 --batch-size {batch_size} --update {update} --warmup 5 --save {}",
            save.display()
        );
        let said = as_ranks(ranks, env!("CARGO_BIN_EXE_dist_trainer"), data.args(&words));
        let losses = numbers_after(&said[0], "| loss: ");
        assert_eq!(losses.len(), 6, "a line every 10 of 30 steps, and 3 evaluations: {}", said[0]);
        assert!(losses[5] < losses[0], "the loss falls: {}", said[0]);
        assert!(said[0].contains("of 30\n") && said[0].contains("best acc: "), "{}", said[0]);
        assert!(said[1..].iter().all(String::is_empty), "only the master speaks: {said:?}");
        let log = std::fs::read_to_string(save.join("fitlog.txt")).unwrap();
        assert_eq!(log.lines().count(), 3, "{log}");
        assert!(save.join("best/model.safetensors").is_file() && save.join("latest/manifest.json").is_file());
    }
}
