//! `drumline-train translate`: any number of ranks gives the same lines.

use std::time::{Duration, Instant};

use drumline_launch::Signal;

use super::Task;

#[test]
fn any_number_of_ranks_gives_the_same_lines_in_their_order() {
    let task = Task::new();
    task.train(2, "training_configs.max_steps 12");
    let mut source: Vec<_> = task.read("test.src").lines().map(str::to_owned).collect();
    source.insert(4, String::new());
    source.push(source[0].repeat(6));
    std::fs::write(task.path("test.src"), source.join("\n") + "\n").unwrap();
    let translate = |nproc: usize, out: &str, more: &str| {
        let words =
            format!("translate --model DIR/save --source DIR/test.src --out DIR/{out} --max-steps 12 {more}");
        task.passes(nproc, &words)
    };
    let said = translate(1, "one.txt", "--batch-size 40");
    assert!(said.contains("translated 13 lines in ") && said.contains("tokens/s by 1 ranks"), "{said}");
    let one = task.read("one.txt");
    let lines: Vec<_> = one.lines().collect();
    assert_eq!((lines.len(), lines[4]), (13, ""));
    assert!(lines.iter().filter(|line| !line.is_empty()).count() >= 6, "{one}");
    for (nproc, more) in [(2, "--batch-size 40"), (4, "--batch-size 40 --shared_dir DIR")] {
        translate(nproc, "several.txt", more);
        assert_eq!(task.read("several.txt"), one, "{nproc} ranks");
    }
    // More ranks than batches.
    translate(3, "several.txt", "--batch_size 100000");
    assert_eq!(task.read("several.txt").lines().count(), 13);

    translate(2, "two", "--keep_n 2 --beam_size 3 --model DIR/save/latest DIR/save/best --alpha -1");
    let [first, second] = ["two.0", "two.1"].map(|name| task.read(name));
    assert!(first.lines().count() == 13 && second.lines().count() == 13 && first != second);
    let names = std::fs::read_dir(task.folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(
        !names.into_iter().any(|name| name.to_string_lossy().starts_with(".drumline")),
        "nothing is left"
    );
}

#[test]
fn what_is_right_scores_and_njunmts_names_are_known() {
    let task = Task::new();
    task.train(1, "training_configs.max_steps 8");
    let words = "translate --model_path DIR/save/best --source_path DIR/valid.src --saveto DIR/out.txt --config_path DIR/nmt.yaml \
                 --reference DIR/valid.tgt --beam_size 2 --max_steps 12 --alpha 0";
    let said = task.passes(2, words);
    assert!(said.contains("BLEU = "), "{said}");
    // The validation has translated the same sentences with the same weights.
    let best = std::fs::read_link(task.path("save/best")).unwrap();
    assert_eq!(task.read("out.txt"), task.read(&format!("valid/{}.txt", best.display())));
    let said = task.passes(1, &words.replace("DIR/valid.tgt", "DIR/out.txt"));
    assert!(said.contains("BLEU = 100.00") || said.contains("BLEU = 0.00"), "of itself: {said}");
}

/// A failure of one rank is reported at once: the others do not translate the rest first.
#[test]
fn a_rank_that_fails_stops_the_others() {
    let task = Task::new();
    task.train(1, "training_configs.max_steps 4");
    let line = task.read("test.src").lines().next().unwrap().to_owned() + "\n";
    std::fs::write(task.path("long.src"), line.repeat(20_000)).unwrap();
    let words =
        "translate --model DIR/save --source DIR/long.src --out DIR/long.txt --batch-size 40 --max-steps 60";
    let dir = task.folder.path().to_str().unwrap();
    let job = super::start(2, words.split_whitespace().map(|word| word.replace("DIR", dir)).collect());
    let soon = Instant::now() + Duration::from_secs(120);
    job.wait_for_line(0, "== step: [", soon).unwrap();
    job.signal(1, Signal::TERM).unwrap();
    let ranks = super::ended(job);
    assert!(ranks.iter().all(|rank| !rank.exit.is_success()), "{}", ranks[0].stdout);
    assert!(
        ranks[0].stderr.contains("rank 1: stopped by SIGTERM before all was translated"),
        "{}",
        ranks[0].stderr
    );
    assert!(!task.path("long.txt").exists());
}
