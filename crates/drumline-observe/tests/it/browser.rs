//! The page in a real browser, while runs are being written.

use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use drumline_observe::fake::FakeRun;

use super::chromium::Chromium;
use super::http::Opened;

const ROW_2: &str = "document.querySelectorAll('#ranks tbody tr')[2]";

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

/// Does a step of the run, and writes the status of its ranks.
fn advance(run: &mut FakeRun) {
    run.step().unwrap();
    run.write_ranks(now()).unwrap();
}

fn points(browser: &Chromium) -> u64 {
    let points = browser.value("Number(document.querySelector('.chart').dataset.points)");
    points.as_u64().unwrap()
}

fn length_of_line(browser: &Chromium) -> u64 {
    browser.value("document.querySelector('.chart .line').getAttribute('d').length").as_u64().unwrap()
}

#[test]
fn curves_grow_while_the_run_is_written_and_stay_after_its_end() {
    let Some(browser) = Chromium::start(1280, 900) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut run = FakeRun::create(folder.path(), 4).unwrap();
    let page = Opened::new(&[folder.path()]);
    browser.open(&page.url);
    // The token is not in the address any more, and scripts cannot read the cookie.
    assert_eq!(browser.value("location.href"), format!("http://{}/", page.host()));
    assert_eq!(browser.value("document.cookie"), "");
    let advance = |run: &mut FakeRun| (0..5).for_each(|_| advance(run));
    browser.wait_while("document.querySelector('.chart .line')", || advance(&mut run));
    let (points_before, length_before) = (points(&browser), length_of_line(&browser));
    browser.wait_while(
        &format!("Number(document.querySelector('.chart').dataset.points) > {points_before} + 50"),
        || advance(&mut run),
    );
    assert!(length_of_line(&browser) > length_before);
    let titles =
        browser.value("[...document.querySelectorAll('.chart h2')].map((title) => title.textContent).join()");
    assert_eq!(titles, "Loss,acc1,Learning rate,Samples per second");
    assert_eq!(browser.value("document.querySelectorAll('#ranks tbody tr.running').length"), 4);
    browser.wait("document.querySelector('.run').dataset.state === 'running'");
    assert!(
        browser.value("document.querySelector('#lines').textContent").as_str().unwrap().contains("4 ranks")
    );
    // After the end everything is still shown, and the page was loaded only once.
    browser.value("window.still = true");
    run.end("finished", None).unwrap();
    run.write_ranks(now()).unwrap();
    browser.wait("document.querySelector('.run').dataset.state === 'finished'");
    browser.wait("document.querySelectorAll('#ranks tbody tr.ended').length === 4");
    assert!(points(&browser) > points_before && browser.value("window.still") == true);
    // The server ends: the page reports it and keeps what it shows.
    drop(page);
    browser.wait("document.querySelector('#link').className === 'gone'");
    assert!(points(&browser) > points_before);
}

#[test]
fn a_killed_rank_turns_red_and_the_others_do_not() {
    let Some(browser) = Chromium::start(1280, 900) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut run = FakeRun::create(folder.path(), 4).unwrap();
    advance(&mut run);
    let page = Opened::new(&[folder.path()]);
    browser.open(&page.url);
    browser.wait_while(&format!("{ROW_2}?.className === 'running'"), || advance(&mut run));
    let colour = "getComputedStyle(document.querySelectorAll('#ranks tbody tr td.rank')[2]).backgroundColor";
    let before = browser.value(colour);
    run.kill(2);
    let begin = Instant::now();
    browser.wait_while(&format!("{ROW_2}.className === 'lost'"), || advance(&mut run));
    assert!(begin.elapsed().as_secs_f64() > 4.0, "a rank that is late is not lost yet");
    assert_ne!(browser.value(colour), before);
    // --bad-back in light colours.
    assert_eq!(browser.value(colour), "rgb(253, 230, 231)");
    assert_eq!(browser.value("document.querySelectorAll('#ranks tbody tr.running').length"), 3);
    assert_eq!(browser.value("document.querySelector('.run .marks').textContent"), "1 lost");
}

#[test]
fn a_waiting_rank_shows_its_collective_and_whom_it_waits_for() {
    let Some(browser) = Chromium::start(1280, 900) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut run = FakeRun::create(folder.path(), 3).unwrap();
    for rank in [0, 2] {
        run.wait_in(rank, "all_reduce(1024 f32, sum) #12 of world at src/train.rs:91", 3.0);
    }
    advance(&mut run);
    let page = Opened::new(&[folder.path()]);
    browser.open(&page.url);
    browser.wait_while(&format!("{ROW_2}?.className === 'waiting'"), || advance(&mut run));
    let text = |row: u32| browser.value(&format!("document.querySelectorAll('td.waits')[{row}].textContent"));
    assert_eq!(text(2), "all_reduce #12 of world for 3.0 s, waits for rank 1 (src/train.rs:91)");
    assert_eq!(text(1), "waited for: 2 in all_reduce(1024 f32, sum) #12 of world at src/train.rs:91 for 3 s");
    assert_eq!(browser.value("document.querySelector('.run .marks').textContent"), "2 waiting1 straggling");
}

#[test]
fn ranks_of_a_pipeline_show_their_places_and_bubbles() {
    let Some(browser) = Chromium::start(1280, 900) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut run = FakeRun::create(folder.path(), 2).unwrap();
    advance(&mut run);
    let page = Opened::new(&[folder.path()]);
    browser.open(&page.url);
    let texts = |class: &str| {
        let cells = format!("[...document.querySelectorAll('#ranks .{class}')]");
        let shown = format!("{cells}.filter((cell) => cell.checkVisibility())");
        browser.value(&format!("{shown}.map((cell) => cell.textContent).join('|')"))
    };
    browser.wait_while("document.querySelectorAll('#ranks tbody tr').length === 2", || advance(&mut run));
    assert_eq!([texts("mesh"), texts("bubble")], ["", ""], "files of an older version");
    run.place(0, "pp 0/2", 0.125);
    run.place(1, "pp 1/2", 0.204);
    browser.wait_while("document.querySelectorAll('td.mesh')[1].textContent !== ''", || advance(&mut run));
    assert_eq!([texts("mesh"), texts("bubble")], ["mesh|pp 0/2|pp 1/2", "bubble|13 %|20 %"]);
}

#[test]
fn hostile_names_do_not_run_as_scripts() {
    let Some(browser) = Chromium::start(1280, 900) else { return };
    let markup = "<img src=x onerror=\"window.hurt=1\"><script>window.hurt=1</script>";
    // The control: inserted as markup it runs, and the test notices.
    browser.open("data:text/html,<body></body>");
    browser.value("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hurt=1\">')");
    browser.wait("window.hurt === 1");

    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join(markup.replace('/', "_"));
    let mut run = FakeRun::create(&folder, 2).unwrap();
    run.host = markup.to_owned();
    run.metric = markup.to_owned();
    run.say(markup).unwrap();
    run.fail(1, markup);
    advance(&mut run);
    run.wait_in(0, markup, 9.0);
    run.write_ranks(now()).unwrap();
    run.end("failed", Some(markup)).unwrap();
    let other = tempfile::tempdir().unwrap();
    FakeRun::create(other.path(), 1).unwrap();
    let page = Opened::new(&[&folder, other.path()]);
    browser.open(&page.url);
    browser.wait("document.querySelectorAll('.chart').length >= 4");
    browser.value("document.querySelector('.run').click()");
    for place in
        [".run .name", ".run .trouble", ".chart h2", ".legend .name", "td.process", "td.waits", "#lines"]
    {
        let text = format!(
            "[...document.querySelectorAll('{place}')].some((one) => one.textContent.includes('onerror='))"
        );
        assert_eq!(browser.value(&text), true, "{place}");
    }
    assert_eq!(browser.value("document.querySelectorAll('main img, main script').length"), 0);
    assert_eq!(browser.value("window.hurt === undefined"), true);
    // Even if some text were inserted as markup, the policy would not let it run.
    browser.value(
        "document.body.insertAdjacentHTML('beforeend', '<img id=probe src=x onerror=\"window.hurt=1\">')",
    );
    browser.wait("document.querySelector('#probe').complete");
    assert_eq!(browser.value("window.hurt === undefined"), true);
}

#[test]
fn several_runs_share_a_chart_and_stragglers_are_marked() {
    let Some(browser) = Chromium::start(1280, 900) else { return };
    let parent = tempfile::tempdir().unwrap();
    let begin = |name: &str| FakeRun::create(&parent.path().join(name), 2).unwrap();
    let (mut first, mut second) = (begin("base"), begin("larger"));
    second.slow_down(1, 1.6);
    (0..250).for_each(|_| first.step().unwrap());
    first.write_ranks(now()).unwrap();
    let folder = |name: &str| parent.path().join(name);
    let page = Opened::new(&[folder("base").as_path(), folder("larger").as_path()] as &[&Path]);
    browser.open(&page.url);
    browser
        .wait_while("document.querySelectorAll('.chart')[1]?.querySelectorAll('.line').length === 2", || {
            advance(&mut second)
        });
    let legend = "[...document.querySelectorAll('.chart:first-child .legend .name')].map((one) => one.textContent).join()";
    assert_eq!(browser.value(legend), "base,base (evaluation),larger");
    assert_eq!(browser.value("document.querySelectorAll('.chart:first-child .line.eval').length"), 1);
    // The pointer shows the values at a step.
    let move_to = "dispatchEvent(new MouseEvent('pointermove', {clientX: 400, clientY: 300}))";
    browser.value(&format!("document.querySelector('.picture').{move_to}"));
    browser.wait("document.querySelector('.chart .of').textContent.startsWith('step ')");
    // A click shows its ranks and its log.
    browser.value("document.querySelectorAll('.run')[1].click()");
    browser.wait_while("document.querySelectorAll('#ranks tbody tr.straggler').length === 1", || {
        advance(&mut second)
    });
    assert_eq!(browser.value("document.querySelector('#ranks .of').textContent"), "larger");
    // A hidden run is removed from the charts.
    browser.value("document.querySelector('.run .shown').click()");
    browser.wait("document.querySelectorAll('.chart:first-child .legend li').length === 1");
}

/// Drags the pointer over a chart; positions are in pixels from its left.
fn drag(browser: &Chromium, chart: usize, from: u32, to: u32) {
    for (event, at) in [("pointerdown", from), ("pointermove", to), ("pointerup", to)] {
        let picture = format!("document.querySelectorAll('.picture')[{chart}]");
        let place = format!("{picture}.getBoundingClientRect().left + {at}");
        let event = format!("new PointerEvent('{event}', {{clientX: {place}, clientY: 300, button: 0}})");
        browser.value(&format!("{picture}.dispatchEvent({event})"));
    }
}

/// The labels of each chart's x-axis: steps or times.
const X_TEXTS: &str = "[...document.querySelectorAll('.grid')].map((grid) => \
    [...grid.querySelectorAll('text[text-anchor=middle]')].map((one) => one.textContent).join(' '))";

#[test]
fn a_zoom_applies_to_all_charts_and_shows_every_step() {
    let Some(browser) = Chromium::start(1280, 900) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut run = FakeRun::create(folder.path(), 1).unwrap();
    (0..5000).for_each(|_| run.step().unwrap());
    run.write_ranks(now()).unwrap();
    let page = Opened::new(&[folder.path()]);
    browser.open(&page.url);
    browser.wait("document.querySelectorAll('.chart').length === 4");
    let all = browser.value(X_TEXTS);
    assert!(all[0].as_str().unwrap().contains("4,000") && all[0] == all[3], "{all}");
    let before = points(&browser);
    assert!(before < 2000, "a curve of 5000 steps has {before} points");
    drag(&browser, 1, 200, 300);
    browser.wait("!document.querySelector('#unzoom').hidden");
    let zoomed = browser.value(X_TEXTS);
    assert!(zoomed[0] != all[0] && zoomed[0] == zoomed[1] && zoomed[0] == zoomed[3], "{zoomed}");
    // A fifth of the steps in full resolution has more than a fifth of the points.
    browser.wait(&format!("Number(document.querySelector('.chart').dataset.points) > {before} / 3"));
    // The pointer is at the same step in all charts.
    let steps = "new Set([...document.querySelectorAll('.chart .of')].map((one) => one.textContent))";
    browser.wait(&format!("{steps}.size === 1 && [...{steps}][0].startsWith('step ')"));
    browser.value("document.querySelector('#unzoom').click()");
    assert_eq!(browser.value(X_TEXTS), all);
    // By time: 0.1 s for each step, and a second for each evaluation.
    browser.value("document.querySelector('#by-time').click()");
    let times = browser.value(X_TEXTS);
    assert!(times[0].as_str().unwrap().ends_with(" min") && times[0] == times[3], "{times}");
}

#[test]
fn the_card_shows_progress_and_times_and_a_small_last_batch_hardly_counts() {
    let Some(browser) = Chromium::start(1280, 900) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut run = FakeRun::create(folder.path(), 4).unwrap();
    // Up to the end of an epoch. Its last batch is a sixteenth of the others, at a quarter of the speed.
    (0..200).for_each(|_| run.step().unwrap());
    run.write_ranks(now()).unwrap();
    let page = Opened::new(&[folder.path()]);
    browser.open(&page.url);
    browser.wait_while("document.querySelector('.run')?.dataset.state === 'running'", || {
        run.write_ranks(now()).unwrap();
    });
    let parts = |place: &str| {
        browser.value(&format!(
            "[...document.querySelectorAll('{place} span')].map((one) => one.textContent).join(', ')"
        ))
    };
    assert_eq!(
        parts(".progress:not(.times)"),
        "epoch 2/20, step 100/100, 200 of 2,000 in total, 4 ranks, cpu"
    );
    let times = parts(".times");
    let times = times.as_str().unwrap();
    assert!(times.starts_with("running for 22 s, ETA 3 min, 3 min in total, 2,"), "{times}");
    assert!(times.contains("best loss ") && times.ends_with("(epoch 2)"), "{times}");
    let last = "document.querySelectorAll('.chart')[3].querySelector('.legend .value').textContent";
    let speed: f64 = browser.value(last).as_str().unwrap().replace(',', "").parse().unwrap();
    assert!(speed > 2400.0, "{speed}: the last batch alone was four times slower");
}

#[test]
fn the_configuration_is_shown_and_what_differs_is_marked() {
    let Some(browser) = Chromium::start(1280, 900) else { return };
    let parent = tempfile::tempdir().unwrap();
    for name in ["one", "two"] {
        let folder = parent.path().join(name);
        FakeRun::create(&folder, 1).unwrap().step().unwrap();
        let path = folder.join("metrics.jsonl");
        let text = std::fs::read_to_string(&path).unwrap();
        let other = text.replace(r#""OPTIM.BASE_LR":0.1"#, r#""OPTIM.BASE_LR":0.2"#);
        assert_ne!(text, other);
        std::fs::write(&path, if name == "two" { other } else { text }).unwrap();
    }
    // The parent folder is enough.
    let page = Opened::new(&[parent.path()]);
    browser.open(&page.url);
    browser
        .wait("document.querySelectorAll('.run').length === 2 && !document.querySelector('#config').hidden");
    browser.value("document.querySelector('#config summary').click()");
    let rows = |kind: &str| {
        let rows = format!("[...document.querySelectorAll('#config tbody tr{kind}')]");
        browser.value(&format!(
            "{rows}.map((row) => [...row.cells].map((cell) => cell.textContent).join('|')).join()"
        ))
    };
    browser.wait("document.querySelectorAll('#config tbody tr').length > 4");
    assert_eq!(rows(".differs"), "OPTIM.BASE_LR|0.1|0.2");
    assert!(rows("").as_str().unwrap().contains("OPTIM.STEPS|[0,30]|[0,30]"));
    browser.value("document.querySelector('#differing').click()");
    assert_eq!(rows(""), "OPTIM.BASE_LR|0.1|0.2");
}
