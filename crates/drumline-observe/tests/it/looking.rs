//! A picture of the page for the docs: `WATCH_PICTURES=FOLDER cargo test -p drumline-observe --test it looking` makes
//! `docs/images/watch.png`. Without the variable the page is drawn, but no file is written.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use drumline_observe::fake::FakeRun;

use super::chromium::Chromium;
use super::http::Opened;

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[test]
fn two_runs_with_all_kinds_of_trouble() {
    let Some(browser) = Chromium::start(1280, 1800) else { return };
    let parent = tempfile::tempdir().unwrap();
    let folders = ["resnet18", "resnet18-lr0.2"].map(|name| parent.path().join(name));
    let mut runs = [0, 1].map(|run: usize| FakeRun::create(&folders[run], 8).unwrap());
    runs[1].floor = 0.7;
    (0..1400).for_each(|_| runs[0].step().unwrap());
    (0..900).for_each(|_| runs[1].step().unwrap());
    runs[0].slow_down(5, 1.4);
    runs[0].wait_in(3, "all_reduce(262144 f32, sum) #1400 of world at src/train.rs:91", 0.4);
    runs[0].say("WARN rank 5 is slower than the others").unwrap();
    runs[1].fail(2, "rank 2: the loss is not a number at step 900");
    runs[1].end("failed", Some("rank 2: the loss is not a number at step 900")).unwrap();
    let page = Opened::new(&[&folders[0], &folders[1]]);
    runs.iter().for_each(|run| run.write_ranks(now()).unwrap());
    browser.open(&page.url);
    browser.wait_while("document.querySelectorAll('tr.straggler').length === 1", || {
        runs[0].step().unwrap();
        runs[0].write_ranks(now()).unwrap();
    });
    runs[0].kill(6);
    browser.wait_while("document.querySelectorAll('tr.lost').length === 1", || {
        runs[0].step().unwrap();
        runs[0].write_ranks(now()).unwrap();
    });
    // Nothing is wider than the window.
    assert_eq!(browser.value("document.documentElement.scrollWidth <= window.innerWidth"), true);
    let picture = browser.screenshot();
    assert!(picture.starts_with(b"\x89PNG"));
    if let Some(folder) = std::env::var_os("WATCH_PICTURES") {
        std::fs::write(PathBuf::from(folder).join("watch.png"), picture).unwrap();
    }
}
