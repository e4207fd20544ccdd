//! A fake run: writes the files of a job, for tests of their readers and to look at the page.
//!
//! It has its own time: each step lasts a tenth of a second, and [`FakeRun::write_ranks`] is given the time to write. The loss
//! falls with some noise, so that the picture is realistic.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use drumline_files::{Durability, replace};
use serde_json::{Map, Value, json};

const STEP_S: f64 = 0.1;
/// When it began: seconds since 1970.
const BEGAN: f64 = 1.7e9;
const STEPS_OF_EPOCH: u64 = 100;
const SAMPLES: u64 = 256;

/// A run's folder while it is being written.
#[derive(Debug)]
pub struct FakeRun {
    folder: PathBuf,
    metrics: File,
    log: File,
    ranks: Vec<FakeRank>,
    step: u64,
    /// Name of the host that ranks report.
    pub host: String,
    /// Name of the metric besides the loss.
    pub metric: String,
    /// The value that the loss approaches.
    pub floor: f64,
    /// The number of epochs that it reports.
    pub epochs: u64,
    /// The least loss of its evaluations.
    best: f64,
}

#[derive(Debug, Clone)]
struct FakeRank {
    state: &'static str,
    error: Option<String>,
    is_silent: bool,
    /// How much longer its work takes than that of others.
    slowness: f64,
    op: Option<(String, f64)>,
    /// Its place in a mesh, and the share of bubbles in its steps.
    stage: Option<(String, f64)>,
}

impl FakeRun {
    /// A new run in `folder`, which is created if it does not exist.
    ///
    /// ```
    /// use drumline_observe::fake::FakeRun;
    ///
    /// let folder = tempfile::tempdir()?;
    /// let mut run = FakeRun::create(folder.path(), 2)?;
    /// run.step()?;
    /// run.write_ranks(1.0)?;
    /// assert!(folder.path().join("ranks/00001.json").exists());
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn create(folder: &Path, world_size: usize) -> io::Result<Self> {
        fs::create_dir_all(folder.join("ranks"))?;
        let open = |name| OpenOptions::new().create(true).append(true).open(folder.join(name));
        let rank = FakeRank {
            state: "running",
            error: None,
            is_silent: false,
            slowness: 1.0,
            op: None,
            stage: None,
        };
        let mut run = Self {
            folder: folder.to_owned(),
            metrics: open("metrics.jsonl")?,
            log: open("log.txt")?,
            ranks: vec![rank; world_size],
            step: 0,
            host: "node-0".to_owned(),
            metric: "acc1".to_owned(),
            floor: 0.4,
            epochs: 20,
            best: f64::INFINITY,
        };
        let event = json!({"kind": "run", "step": 0, "epoch": 0, "world_size": world_size, "num_nodes": 1, "seed": 1,
            "device": "cpu", "num_threads": 1, "drumline": "0.1.0", "libtorch": "2.11.0", "time": BEGAN as u64,
            "config": {"MODEL.ARCH": "resnet18", "OPTIM.BASE_LR": 0.1, "OPTIM.STEPS": [0, 30], "TRAIN.MAX_STEPS": null}});
        run.write(&event)?;
        run.say(&format!("INFO {world_size} ranks, a fake run"))?;
        Ok(run)
    }

    /// A step, and an evaluation at the end of each epoch.
    pub fn step(&mut self) -> io::Result<()> {
        self.step += 1;
        let epoch = (self.step - 1) / STEPS_OF_EPOCH;
        if (self.step - 1).is_multiple_of(STEPS_OF_EPOCH) {
            let total_steps = self.epochs * STEPS_OF_EPOCH;
            self.write(
                &json!({"kind": "epoch", "step": self.step - 1, "epoch": epoch, "epochs": self.epochs,
                "step_in_epoch": 0, "steps_per_epoch": STEPS_OF_EPOCH, "total_steps": total_steps}),
            )?;
        }
        let along = self.step as f64 / 400.0;
        let loss = self.floor + 2.0 * (-along).exp() + self.noise(1) * 0.25 * (0.2 + (-along).exp());
        let accuracy = 95.0 * (1.0 - (-along * 0.8).exp()) + self.noise(2) * 3.0;
        let lr = 0.1 * (along.min(0.2) * 5.0) * (0.5 + 0.5 * (along / 4.0).cos());
        // The last batch of an epoch is small, and takes longer per sample.
        let is_last = self.step.is_multiple_of(STEPS_OF_EPOCH);
        let (samples, slowness) = if is_last { (SAMPLES / 16, 0.25) } else { (SAMPLES, 1.0) };
        let speed = SAMPLES as f64 / STEP_S * slowness * (1.0 + 0.04 * self.noise(3));
        let mut event = Map::new();
        let fields = [
            ("loss", loss),
            ("lr", lr),
            ("samples_per_s", speed),
            (&self.metric, accuracy.clamp(0.0, 100.0)),
            ("time", self.time()),
        ];
        event.extend(
            [("kind", Value::from("step")), ("step", self.step.into()), ("epoch", epoch.into())]
                .map(|(name, value)| (name.to_owned(), value)),
        );
        event.insert("samples".to_owned(), samples.into());
        event.extend(fields.map(|(name, value)| (name.to_owned(), value.into())));
        self.write(&Value::Object(event))?;
        if self.step.is_multiple_of(20) {
            self.say(&format!(
                "   == step: [{:3}/{STEPS_OF_EPOCH}] [{}/{}] | loss: {loss:.3} | lr: {lr:.4} | {speed:.0} img/s",
                (self.step - 1) % STEPS_OF_EPOCH + 1,
                epoch + 1,
                self.epochs,
            ))?;
        }
        if is_last {
            let is_best = loss + 0.1 < self.best;
            self.best = self.best.min(loss + 0.1);
            let event = json!({"kind": "eval", "epoch": epoch + 1, "step": self.step, "samples": 1000,
                "loss": loss + 0.1, "k": 5, "time": self.time() + 1.0, "metric_key": "loss", "is_best": is_best});
            self.write(&event)?;
        }
        Ok(())
    }

    /// Writes each rank's file with this time; silent ranks write nothing.
    pub fn write_ranks(&self, time: f64) -> io::Result<()> {
        let slowest = self.ranks.iter().map(|rank| rank.slowness).fold(1.0, f64::max);
        for (number, rank) in self.ranks.iter().enumerate().filter(|(_, rank)| !rank.is_silent) {
            let run_s = self.step as f64 * STEP_S;
            let work = 0.7 * rank.slowness / slowest;
            let (op, op_s) = rank.op.clone().map_or((None, 0.0), |(op, seconds)| (Some(op), seconds));
            let mut status = json!({"rank": number, "host": self.host, "pid": 4000 + number, "state": rank.state,
                "error": rank.error, "step": self.step, "epoch": self.step / STEPS_OF_EPOCH, "op": op, "op_s": op_s,
                "load_s": run_s * 0.05, "compute_s": run_s * work, "comm_s": run_s * (0.93 - work),
                "memory_bytes": 900_000_000_u64 + 7_000_000 * (number as u64 % 5), "peak_bytes": 1_300_000_000_u64,
                "slow": (rank.slowness > 1.1).then_some(rank.slowness),
                "samples_per_s": SAMPLES as f64 / STEP_S / self.ranks.len() as f64, "time": time});
            // Without them it is a file of an older version.
            if let Some((mesh, bubble)) = &rank.stage {
                (status["mesh"], status["bubble"]) = (json!(mesh), json!(bubble));
            }
            let path = self.folder.join(format!("ranks/{number:05}.json"));
            replace(path, status.to_string(), Durability::Process)?;
        }
        Ok(())
    }

    /// The rank writes nothing any more, like one that was killed.
    pub fn kill(&mut self, rank: usize) {
        self.ranks[rank].is_silent = true;
    }

    /// The rank's work takes this many times longer than that of others.
    pub fn slow_down(&mut self, rank: usize, times: f64) {
        self.ranks[rank].slowness = times;
    }

    /// The rank has this place in a mesh, and this share of bubbles in its steps.
    pub fn place(&mut self, rank: usize, mesh: &str, bubble: f64) {
        self.ranks[rank].stage = Some((mesh.to_owned(), bubble));
    }

    /// The rank has been in a collective for some seconds.
    pub fn wait_in(&mut self, rank: usize, op: &str, seconds: f64) {
        self.ranks[rank].op = Some((op.to_owned(), seconds));
    }

    /// The rank has failed with this error.
    pub fn fail(&mut self, rank: usize, error: &str) {
        (self.ranks[rank].state, self.ranks[rank].error) = ("failed", Some(error.to_owned()));
    }

    /// Adds a line to the log.
    pub fn say(&mut self, line: &str) -> io::Result<()> {
        self.log.write_all(format!("{line}\n").as_bytes())
    }

    /// Writes the last event; running ranks have ended.
    pub fn end(&mut self, reason: &str, error: Option<&str>) -> io::Result<()> {
        let epoch = self.step / STEPS_OF_EPOCH;
        self.write(&json!({"kind": "end", "step": self.step, "epoch": epoch, "reason": reason, "error": error, "time": self.time().ceil() as u64}))?;
        let running = self.ranks.iter_mut().filter(|rank| rank.state == "running");
        running.for_each(|rank| (rank.state, rank.op) = ("ended", None));
        Ok(())
    }

    fn write(&mut self, event: &Value) -> io::Result<()> {
        self.metrics.write_all(format!("{event}\n").as_bytes())
    }

    /// The time of the run's own clock; evaluations take a second.
    fn time(&self) -> f64 {
        BEGAN + self.step as f64 * STEP_S + (self.step.saturating_sub(1) / STEPS_OF_EPOCH) as f64
    }

    /// A number between -1 and 1, the same for the same step.
    fn noise(&self, kind: u64) -> f64 {
        let mut mixed = (self.step * 7919 + kind).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 40) as f64 / f64::from(1 << 23) - 1.0
    }
}
