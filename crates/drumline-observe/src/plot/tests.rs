//! Plots of made-up runs: what they contain, and what cannot be drawn.

use super::*;
use crate::events::{EvalEvent, StepEvent, metrics as figures};

/// A loss that falls with noise, and an evaluation each 100 steps.
fn run(name: &str, speed: f64, steps: u64) -> Run {
    let mut events = Vec::new();
    for step in 1..=steps {
        let noise = ((step * 7919) % 101) as f64 / 101.0 - 0.5;
        let loss = 2.3 * (-(step as f64) * speed).exp() + 0.1 + 0.2 * noise.abs();
        let metrics = figures([("acc1", 100.0 - 40.0 * loss)]);
        events.push(Event::Step(StepEvent {
            step,
            loss,
            lr: 0.1,
            samples_per_s: 800.0,
            metrics,
            ..Default::default()
        }));
        if step % 100 == 0 {
            let metrics = figures([("loss", loss + 0.2), ("acc1", 90.0 - 40.0 * loss), ("k", 5.0)]);
            events.push(Event::Eval(EvalEvent {
                epoch: step / 100,
                step,
                samples: 500,
                metrics,
                ..EvalEvent::default()
            }));
        }
    }
    Run { name: name.into(), events }
}

fn svg(runs: &[Run], metrics: &[&str], options: PlotOptions) -> Result<String, PlotError> {
    let metrics: Vec<String> = metrics.iter().map(|metric| (*metric).to_owned()).collect();
    draw(runs, &metrics, Format::Svg, options).map(|bytes| String::from_utf8(bytes).unwrap())
}

#[test]
fn a_plot_names_runs_metrics_and_steps() {
    let runs = [run("first", 0.01, 1000), run("second", 0.003, 800)];
    let smooth = PlotOptions { smooth: 0.9, ..PlotOptions::default() };
    let picture = svg(&runs, &["loss", "acc1"], smooth).unwrap();
    for text in ["first", "first (eval)", "second", "loss", "acc1", "step", "1000", "2.0"] {
        assert!(picture.contains(&format!("\n{text}\n")), "{text}");
    }
    assert!(picture.starts_with("<svg width=\"1440\" height=\"440\" viewBox=\"0 0 5760 1760\""));
}

#[test]
fn the_default_metrics_are_the_loss_and_those_of_evaluations() {
    assert_eq!(usual_metrics(&[run("a", 0.01, 100)]), ["loss", "acc1"]);
    assert_eq!(
        metrics(&[run("a", 0.01, 1)]).into_iter().collect::<Vec<_>>(),
        ["acc1", "loss", "lr", "samples_per_s"]
    );
}

#[test]
fn long_runs_make_no_large_files() {
    let picture = svg(&[run("long", 1e-5, 200_000)], &["loss"], PlotOptions::default()).unwrap();
    assert!(picture.len() < 100_000, "{} bytes", picture.len());
}

#[test]
fn a_hostile_name_is_text() {
    let name = "<script>alert('1')</script>\"&";
    let picture = svg(&[run(name, 0.01, 10)], &["loss"], PlotOptions::default()).unwrap();
    assert!(!picture.contains("<script>") && picture.contains("&lt;script&gt;"));
}

#[test]
fn few_and_strange_values_are_drawn_too() {
    let values = |values: &[f64]| {
        let step = |(at, loss): (usize, &f64)| {
            Event::Step(StepEvent { step: at as u64, loss: *loss, ..Default::default() })
        };
        [Run { name: "x".into(), events: values.iter().enumerate().map(step).collect() }]
    };
    for some in
        [&[1.0][..], &[0.0, 0.0], &[1.0, f64::NAN, 2.0], &[1e-30, 1e30], &[-1e300, 1e300], &[5e-324, 1.0]]
    {
        svg(&values(some), &["loss"], PlotOptions::default()).unwrap();
    }
    let log = PlotOptions { scale: Scale::Log, ..PlotOptions::default() };
    svg(&values(&[0.0, 1.0, 10.0]), &["loss"], log).unwrap();
    let error = svg(&values(&[0.0, -1.0]), &["loss"], log).unwrap_err().to_string();
    assert_eq!(error, "`loss` has no value that can be shown on a logarithmic axis; try without --log");
    let error = svg(&values(&[f64::NAN]), &["loss"], PlotOptions::default()).unwrap_err().to_string();
    assert!(error.contains("all are NaN or infinite"), "{error}");
}

#[test]
fn errors_list_what_exists() {
    let runs = [run("a", 0.01, 100), run("b", 0.01, 100)];
    let error = svg(&runs, &["accuracy"], PlotOptions::default()).unwrap_err().to_string();
    assert_eq!(error, "no metric `accuracy` in a, b; try acc1, loss, lr, samples_per_s");
    let error = load(&["/no/such/run".into()]).unwrap_err().to_string();
    assert!(
        error.starts_with("no run in /no/such/run: there is no metrics.jsonl in it or one level down; try"),
        "{error}"
    );
    let empty = Run { name: "new".into(), events: Vec::new() };
    assert!(
        svg(&[empty], &[], PlotOptions::default())
            .unwrap_err()
            .to_string()
            .starts_with("no steps and no eval")
    );
    let smooth = PlotOptions { smooth: 1.0, ..PlotOptions::default() };
    assert!(svg(&runs, &[], smooth).unwrap_err().to_string().contains("less than 1; try 0.9"));
    assert!(Format::of(Path::new("a.pdf")).unwrap_err().to_string().contains(".svg or .png"));
}

#[test]
fn runs_have_unique_names() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["x/a", "y/a", "y/b"].map(|path| folder.path().join(path));
    for path in &paths {
        fs::create_dir_all(path).unwrap();
        fs::write(path.join(METRICS), "{\"kind\":\"step\",\"step\":1,\"loss\":1}\n").unwrap();
    }
    let names = |paths: &[PathBuf]| load(paths).unwrap().into_iter().map(|run| run.name).collect::<Vec<_>>();
    assert_eq!(names(&paths[1..]), ["a", "b"]);
    assert_eq!(
        names(&paths[..2]),
        paths[..2].iter().map(|path| path.display().to_string()).collect::<Vec<_>>()
    );
    assert_eq!(names(&[paths[0].join(METRICS)]), [METRICS]);
}

#[test]
fn a_png_has_two_pixels_for_each_point() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plot.png");
    let options = PlotOptions { smooth: 0.9, ..PlotOptions::default() };
    save(&file, &[run("first", 0.01, 1000)], &["loss".into(), "acc1".into(), "lr".into()], options).unwrap();
    let picture = image::open(&file).unwrap().to_rgb8();
    assert_eq!(picture.dimensions(), (2 * 1440, 2 * 880));
    let count = |color: [u8; 3]| picture.pixels().filter(|pixel| pixel.0 == color).count();
    assert!(count([0, 114, 178]) > 1000, "the curve of the training");
    assert!(count([213, 94, 0]) > 1000, "the curve of the evaluations");
    assert!(count([255, 255, 255]) > 2_000_000, "the rest is white");
}
