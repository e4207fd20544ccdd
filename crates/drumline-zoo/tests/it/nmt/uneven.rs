//! Text that cannot be shared evenly: no rank waits for another forever.

use drumline_text::synth::SynthOptions;

use super::Task;

#[test]
fn empty_lines_and_long_sentences_are_left_out_and_reported_once() {
    let task = Task::new();
    let mut source: Vec<_> = task.read("train.src").lines().map(str::to_owned).collect();
    source[3] = String::new();
    source[7] = "word ".repeat(60);
    std::fs::write(task.path("train.src"), source.join("\n") + "\n").unwrap();
    let mut valid: Vec<_> = task.read("valid.src").lines().map(str::to_owned).collect();
    valid[5] = "  ".into();
    std::fs::write(task.path("valid.src"), valid.join("\n") + "\n").unwrap();
    let ranks = task
        .run(3, "nmt --config_path DIR/nmt.yaml training_configs.max_steps 8 data_configs.max_len [50,50]");
    assert!(ranks.iter().all(|rank| rank.exit.is_success()), "{}", ranks[0].stderr);
    let said: String = ranks.iter().map(|rank| rank.stdout.as_str()).collect();
    let expected =
        "[data] == train: 98 pairs; 2 of 100 pairs left out (1 with an empty side, 1 over max_len) ==";
    assert_eq!(said.matches(expected).count(), 1, "{said}");
    let translated = task.read("valid/step-00000008.txt");
    let lines: Vec<_> = translated.lines().collect();
    assert_eq!((lines.len(), lines[5]), (13, ""));
    assert_eq!(task.column("eval", "samples").last(), Some(&12.0));
}

/// NJUNMT's ranks would wait forever for the one that has run out of batches.
#[test]
fn ranks_without_batches_join_the_remaining_steps() {
    for (train, nproc) in [(3, 4), (5, 2), (1, 3)] {
        let task = Task::of(&SynthOptions { train, valid: 1, test: 1, ..SynthOptions::default() });
        let pairs = "training_configs.batching_key samples training_configs.batch_size 2 training_configs.update_cycle 2";
        let said = task.train(nproc, &format!("{pairs} training_configs.max_epochs 3"));
        assert!(said.contains("Training Finished"), "{said}");
        let samples: f64 = task.column("step", "samples").iter().sum();
        assert_eq!(samples, 3.0 * train as f64, "each pair once an epoch, {nproc} ranks");
    }
}

#[test]
fn the_seeds_command_line_works_and_objects_go_through_the_shared_folder() {
    let task = Task::new();
    let words = "nmt --model_name zh2en --config_path DIR/nmt.yaml --log_path DIR/l --saveto DIR/s --valid_path DIR/v \
                 --shared_dir DIR/shared --multi_gpu training_configs.max_steps 8";
    let said = task.passes(2, words);
    assert!(said.contains("   zh2en: 8 steps | best bleu "), "{said}");
    assert_eq!(task.read("v/step-00000008.txt").lines().count(), 13);
    assert_eq!(std::fs::read_dir(task.path("shared")).unwrap().count(), 0, "nothing is left there");
    assert!(task.path("s/best").is_dir() && task.path("s/config.yaml").is_file());
    assert_eq!(std::fs::read_dir(task.path("l/tensorboard")).unwrap().count(), 1);
    let again =
        task.passes(2, &words.replace("max_steps 8", "max_steps 12").replace("--multi_gpu", "--reload"));
    assert!(again.contains("[resume] == after step 8") && again.contains("12 steps"), "{again}");
}
