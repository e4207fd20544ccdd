//! `PARALLEL`: how the ranks of a job train one model together.

use std::path::{Path, PathBuf};

use drumline::engine::pipeline::{PipelineSize, Schedule};
use drumline::engine::{CommHook, Compressed, Offload, Place, ShardOptions, Stage};
use serde_json::{Value as Json, json};

use super::check::invalid;
use super::error::ConfigError;
use super::section::section;
use super::setting::{Setting, choice};
use super::value::Value;

section! {
    /// `PARALLEL`: how ranks train one model together.
    Parallel "PARALLEL" {
        /// Stage of ZeRO. 0: each rank has everything (DDP); 1: ranks divide the optimizer's state; 2: the gradients too; 3: the parameters too
        "ZERO" zero: Stage = Stage::Zero0;
        /// Replicas of the model, each divided among PARALLEL.SHARD ranks; null: ranks / SHARD
        "DP" dp: Option<usize> = None;
        /// Ranks among which a replica is divided; null: ranks / DP, or all ranks if DP is null, too
        "SHARD" shard: Option<usize> = None;
        /// Ranks among which the layers are divided as stages of a pipeline
        "PP" pp: usize = 1;
        /// With PP, in which order ranks compute
        "SCHEDULE" schedule: Schedule = Schedule::OneFOneB;
        /// With PP, stages of each rank; null: 2 for interleaved, bfs and zbv, 1 for the others
        "CHUNKS" chunks: Option<usize> = None;
        /// Batches of a step on each rank, which are the micro-batches of a pipeline; null: TRAIN.ACCUMULATE
        "MICRO_BATCHES" micro_batches: Option<usize> = None;
        /// Ranks among which each layer is cut: its heads, features and vocabulary
        "TP" tp: usize = 1;
        /// Ranks among which the tokens of each text are cut, with ring attention
        "CP" cp: usize = 1;
        /// With ZERO 3, parameters of at most this many elements stay gathered
        "KEEP_GATHERED" keep_gathered: usize = 100_000;
        /// With ZERO 0, data type in which gradients are sent; null: their own
        "REDUCE_IN" reduce_in: Option<ReduceIn> = None;
        /// Where the optimizer's state lies between steps. none: where the model trains; host: in host memory; disk: in files, for ranks on a CPU; auto: where the model trains as far as it fits, and the rest in host memory beside a GPU, or in files
        "OFFLOAD" offload: OffloadKind = OffloadKind::None;
        /// Where each rank's rows of parameters lie with PARALLEL.ZERO 3, in the same words, for ranks on a CPU; auto: in files
        "OFFLOAD_PARAMS" offload_params: OffloadKind = OffloadKind::None;
        /// Folder of the files; null: OUT_DIR
        "OFFLOAD_DIR" offload_dir: Option<PathBuf> = None;
        /// The part of the optimizer's state that is offloaded with PARALLEL.OFFLOAD host or disk
        "OFFLOAD_RATIO" offload_ratio: f64 = 1.0;
    }
}

/// How a model can be cut among ranks.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cuts {
    /// Along `tp` by its heads; `None` if it cannot be.
    pub(crate) heads: Option<Heads>,
    /// Along `pp`, into so many stages at most; `None` if it cannot be.
    pub(crate) layers: Option<usize>,
}

/// The heads of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    /// The key of their number.
    pub(crate) key: &'static str,
    /// Their number.
    pub(crate) count: usize,
    /// Whether texts can be cut along `cp`, too.
    pub(crate) has_cp: bool,
}

const NO_CUT: &str = "and this model is not cut among ranks; try 1, or the configuration of a GPT";
const NO_STAGES: &str = "and this model is not cut into stages; try 1, or the configuration of a GPT, a BERT, a translation or a ResNet";

choice! {
    /// The data type in which gradients are sent.
    ReduceIn, "bf16 or fp16" {
        /// bfloat16
        Bf16 = "bf16",
        /// float16
        Fp16 = "fp16",
    }
}

impl ReduceIn {
    /// The hook that sends gradients in this type.
    pub(crate) fn hook(self) -> Box<dyn CommHook> {
        Box::new(match self {
            Self::Bf16 => Compressed::bf16(),
            Self::Fp16 => Compressed::half(),
        })
    }
}

choice! {
    /// Where states of a training lie between their uses.
    OffloadKind, "none, host, disk or auto" {
        /// Where the model trains.
        None = "none",
        /// In host memory.
        Host = "host",
        /// In files.
        Disk = "disk",
        /// Where the model trains as far as it fits, and the rest in host memory beside a GPU, or in files.
        Auto = "auto",
    }
}

impl Parallel {
    /// Returns an error for values that fit no number of ranks.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let Self { zero, dp, shard, reduce_in, offload, offload_params, offload_dir, offload_ratio, .. } =
            self;
        let (zero, dp, shard, reduce_in) = (*zero, *dp, *shard, *reduce_in);
        let sizes = [
            ("PARALLEL.DP", dp),
            ("PARALLEL.SHARD", shard),
            ("PARALLEL.TP", Some(self.tp)),
            ("PARALLEL.CP", Some(self.cp)),
            ("PARALLEL.PP", Some(self.pp)),
            ("PARALLEL.CHUNKS", self.chunks),
            ("PARALLEL.MICRO_BATCHES", self.micro_batches),
        ];
        for (key, value) in sizes {
            if value == Some(0) {
                return invalid(key, "is 0; try 1 or more");
            }
        }
        if let Some(kind) = reduce_in.filter(|_| zero != Stage::Zero0) {
            let what =
                format!("is {}, and with PARALLEL.ZERO gradients keep their type; try null", kind.name());
            return invalid("PARALLEL.REDUCE_IN", what);
        }
        if zero == Stage::Zero0
            && let Some(shard) = shard.filter(|shard| *shard > 1)
        {
            return invalid(
                "PARALLEL.SHARD",
                format!("is {shard}, and PARALLEL.ZERO 0 divides nothing; try PARALLEL.ZERO 3"),
            );
        }
        if zero == Stage::Zero3 && self.pp > 1 {
            let what = format!(
                "is 3, and with PARALLEL.PP {} each rank keeps the parameters of its stages; try 2",
                self.pp
            );
            return invalid("PARALLEL.ZERO", what);
        }
        let places = [("PARALLEL.OFFLOAD", offload), ("PARALLEL.OFFLOAD_PARAMS", offload_params)];
        if let Some((key, kind)) = places.into_iter().find(|(_, kind)| **kind != OffloadKind::None)
            && self.is_cut()
        {
            let what = format!("is {}, which {} does not support; try none", kind.name(), self.cut_sizes());
            return invalid(key, what);
        }
        let has_files = [offload, offload_params].iter().any(|kind| kind.has_files());
        if offload_params.has_files() && zero != Stage::Zero3 {
            let (kind, zero) = (offload_params.name(), zero.number());
            let what = format!(
                "is {kind}, and with PARALLEL.ZERO {zero} ranks have whole parameters; try PARALLEL.ZERO 3"
            );
            return invalid("PARALLEL.OFFLOAD_PARAMS", what);
        }
        if let Some(folder) = offload_dir.as_ref().filter(|_| !has_files) {
            let (folder, offload) = (folder.display(), offload.name());
            let what = format!(
                "is {folder}, and PARALLEL.OFFLOAD {offload} makes no files; try PARALLEL.OFFLOAD disk"
            );
            return invalid("PARALLEL.OFFLOAD_DIR", what);
        }
        if !(0.0..=1.0).contains(offload_ratio) {
            return invalid(
                "PARALLEL.OFFLOAD_RATIO",
                format!("is {offload_ratio}; try at least 0 and at most 1"),
            );
        }
        Ok(())
    }

    /// Whether ranks have parts of the model or of texts.
    pub(crate) fn is_cut(&self) -> bool {
        self.num_parts() > 1
    }

    /// The number of ranks that have a replica of the model and its texts together.
    fn num_parts(&self) -> usize {
        self.pp * self.tp * self.cp
    }

    /// The keys of these ranks that are not 1, with their values.
    fn cut_sizes(&self) -> String {
        let sizes = [("PARALLEL.PP", self.pp), ("PARALLEL.TP", self.tp), ("PARALLEL.CP", self.cp)];
        let sizes: Vec<_> = sizes
            .into_iter()
            .filter(|(_, size)| *size > 1)
            .map(|(key, size)| format!("{key} {size}"))
            .collect();
        sizes.join(" with ")
    }

    /// The stages of each rank.
    pub(crate) fn chunks(&self) -> usize {
        self.chunks.unwrap_or(self.schedule.default_chunks())
    }

    /// Returns an error if the schedule has no program for steps of so many micro-batches.
    pub(crate) fn check_schedule(&self, micro_batches: usize) -> Result<(), ConfigError> {
        if self.pp == 1 {
            return Ok(());
        }
        let size = PipelineSize { ranks: self.pp, chunks: self.chunks(), micro_batches };
        match self.schedule.program(size) {
            Ok(_) => Ok(()),
            Err(error) => invalid("PARALLEL.SCHEDULE", format!("is {}: {error}", self.schedule)),
        }
    }

    /// Returns an error if the model cannot be cut in this way.
    pub(crate) fn check_model(&self, cuts: Cuts) -> Result<(), ConfigError> {
        let Self { pp, tp, cp, .. } = *self;
        match cuts.layers {
            None if pp > 1 => return invalid("PARALLEL.PP", format!("is {pp}, {NO_STAGES}")),
            Some(layers) if pp > 1 && pp * self.chunks() > layers => {
                let (chunks, stages) = (self.chunks(), pp * self.chunks());
                let what = format!(
                    "is {pp} with {chunks} stages a rank (PARALLEL.CHUNKS), together {stages}, and the model has {layers} layers; try at \
                     most {}",
                    (layers / chunks).max(1)
                );
                return invalid("PARALLEL.PP", what);
            }
            _ => {}
        }
        let Some(Heads { key, count, has_cp }) = cuts.heads else {
            return match (tp > 1, cp > 1) {
                (true, _) => invalid("PARALLEL.TP", format!("is {tp}, {NO_CUT}")),
                (_, true) => invalid("PARALLEL.CP", format!("is {cp}, {NO_CUT}")),
                _ => Ok(()),
            };
        };
        if !count.is_multiple_of(tp) {
            let divisors = divisors(count);
            let what = format!("is {tp}, which does not divide {key} {count}; try a divisor: {divisors}");
            return invalid("PARALLEL.TP", what);
        }
        if cp > 1 && !has_cp {
            let what = format!("is {cp}, and only the texts of a GPT can be cut; try 1, and PARALLEL.TP");
            return invalid("PARALLEL.CP", what);
        }
        Ok(())
    }

    /// The number of ranks that have the same part of the layers and texts, among this many.
    pub(crate) fn replicas(&self, num_ranks: usize) -> Result<usize, ConfigError> {
        let parts = self.num_parts();
        if num_ranks.is_multiple_of(parts) {
            return Ok(num_ranks / parts);
        }
        let largest = [("PARALLEL.PP", self.pp), ("PARALLEL.TP", self.tp), ("PARALLEL.CP", self.cp)];
        let (key, _) = largest.into_iter().find(|(_, size)| *size > 1).unwrap_or(largest[0]);
        let what = format!(
            "does not fit: {} are {parts} ranks, and the job has {num_ranks}; try a product among the divisors of {num_ranks}: {}",
            self.cut_sizes(),
            divisors(num_ranks)
        );
        invalid(key, what).map(|()| 0)
    }

    /// The options of the sharded engine for a job of so many ranks; `None` for DDP. Files of state are in `out_dir`, unless
    /// the configuration has another folder.
    pub(crate) fn shard_options(
        &self,
        job_ranks: usize,
        out_dir: &Path,
    ) -> Result<Option<ShardOptions>, ConfigError> {
        let Self { zero, dp, shard, keep_gathered, .. } = *self;
        let num_ranks = self.replicas(job_ranks)?;
        let cut = if self.is_cut() {
            format!(" ({job_ranks} / {})", self.cut_sizes().replace(" with ", " / "))
        } else {
            String::new()
        };
        let (dp, shard) = match (dp, shard) {
            (None, None) if zero == Stage::Zero0 => (num_ranks, 1),
            (None, None) => (1, num_ranks),
            (Some(dp), None) => (dp, num_ranks / dp),
            (None, Some(shard)) => (num_ranks / shard, shard),
            (Some(dp), Some(shard)) => (dp, shard),
        };
        if dp * shard != num_ranks || (zero == Stage::Zero0 && shard > 1) {
            let what = format!(
                "is {dp} and PARALLEL.SHARD {shard}, together {} ranks, and the job has {num_ranks}{cut}; try divisors of {num_ranks}: {}",
                dp * shard,
                divisors(num_ranks)
            );
            return invalid("PARALLEL.DP", what).map(|()| None);
        }
        let offload = self.offload(out_dir);
        if zero == Stage::Zero0 && num_ranks > 1 && !offload.is_none() {
            let what = format!(
                "is {}, and with PARALLEL.ZERO 0 each of {num_ranks} ranks has all of the optimizer's state; try PARALLEL.ZERO 1",
                self.offload.name()
            );
            return invalid("PARALLEL.OFFLOAD", what).map(|()| None);
        }
        let is_sharded = zero != Stage::Zero0 || !offload.is_none();
        let options = ShardOptions { shard: Some(shard), keep_gathered, offload, ..ShardOptions::new(zero) };
        Ok(is_sharded.then_some(options))
    }

    fn offload(&self, out_dir: &Path) -> Offload {
        let folder = self.offload_dir.as_deref().unwrap_or(out_dir);
        let [optimizer, parameters] = [self.offload, self.offload_params].map(|kind| kind.place(folder));
        Offload { optimizer, parameters, ratio: self.offload_ratio, ..Offload::default() }
    }
}

impl OffloadKind {
    fn has_files(self) -> bool {
        matches!(self, Self::Disk | Self::Auto)
    }

    fn place(self, folder: &Path) -> Place {
        match self {
            Self::None => Place::Device,
            Self::Host => Place::Host,
            Self::Disk => Place::Disk(folder.to_owned()),
            Self::Auto => Place::Auto(folder.to_owned()),
        }
    }
}

fn divisors(number: usize) -> String {
    let divisors = (1..=number).filter(|divisor| number.is_multiple_of(*divisor));
    divisors.map(|divisor| divisor.to_string()).collect::<Vec<_>>().join(", ")
}

impl Setting for Schedule {
    fn expects() -> String {
        "gpipe, 1f1b, interleaved, bfs, zb1p or zbv".into()
    }

    fn schema() -> Json {
        json!({"enum": Self::ALL.map(Self::name)})
    }

    fn read(value: &Value) -> Option<Self> {
        String::read(value)?.trim().parse().ok()
    }

    fn write(&self) -> Value {
        Value::Text(self.name().to_owned())
    }
}

impl Setting for Stage {
    fn expects() -> String {
        "0, 1, 2 or 3".into()
    }

    fn schema() -> Json {
        json!({"enum": [0, 1, 2, 3]})
    }

    fn read(value: &Value) -> Option<Self> {
        match value {
            Value::Int(number) => number.to_string().parse().ok(),
            Value::Text(text) => text.trim().parse().ok(),
            _ => None,
        }
    }

    fn write(&self) -> Value {
        Value::Int(self.number().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(dp: Option<usize>, shard: Option<usize>, zero: Stage) -> Result<Option<usize>, String> {
        let parallel = Parallel { zero, dp, shard, ..Parallel::default() };
        Ok(options(&parallel, 4)?.and_then(|options| options.shard))
    }

    fn options(parallel: &Parallel, num_ranks: usize) -> Result<Option<ShardOptions>, String> {
        parallel.check().map_err(|error| error.to_string())?;
        parallel.shard_options(num_ranks, Path::new("exp")).map_err(|error| error.to_string())
    }

    #[test]
    fn state_is_offloaded_to_the_folder_of_the_run_or_another() {
        let disk = Parallel { offload: OffloadKind::Disk, ..Parallel::default() };
        let places =
            |parallel: &Parallel| Ok::<_, String>(options(parallel, 1)?.map(|options| options.offload));
        let in_folder =
            |folder: &str| Offload { optimizer: Place::Disk(folder.into()), ..Offload::default() };
        assert_eq!(places(&disk), Ok(Some(in_folder("exp"))));
        let elsewhere = Parallel { offload_dir: Some("/scratch".into()), zero: Stage::Zero1, ..disk.clone() };
        assert_eq!(places(&elsewhere), Ok(Some(in_folder("/scratch"))));
        assert_eq!(places(&Parallel::default()), Ok(None));
        let error = options(&disk, 2).unwrap_err();
        assert!(
            error.ends_with(
                "with PARALLEL.ZERO 0 each of 2 ranks has all of the optimizer's state; try PARALLEL.ZERO 1"
            ),
            "{error}"
        );
        let error = places(&Parallel { offload: OffloadKind::None, ..elsewhere }).unwrap_err();
        assert!(error.contains("is /scratch, and PARALLEL.OFFLOAD none makes no files"), "{error}");
        let params = Parallel { offload_params: OffloadKind::Disk, ..Parallel::default() };
        let error = places(&params).unwrap_err();
        assert!(
            error.ends_with("with PARALLEL.ZERO 0 ranks have whole parameters; try PARALLEL.ZERO 3"),
            "{error}"
        );
        let params = places(&Parallel { zero: Stage::Zero3, ..params }).unwrap().unwrap();
        assert_eq!((params.optimizer, params.parameters), (Place::Device, Place::Disk("exp".into())));
        assert!(
            places(&Parallel { offload_ratio: 1.5, ..disk }).unwrap_err().contains("is 1.5; try at least 0")
        );
    }

    #[test]
    fn sizes_follow_from_the_number_of_ranks() {
        assert_eq!(sizes(None, None, Stage::Zero0), Ok(None));
        assert_eq!(sizes(Some(4), None, Stage::Zero0), Ok(None));
        assert_eq!(sizes(None, None, Stage::Zero3), Ok(Some(4)));
        assert_eq!(sizes(Some(2), None, Stage::Zero2), Ok(Some(2)));
        assert_eq!(sizes(None, Some(1), Stage::Zero1), Ok(Some(1)));
        assert_eq!(sizes(Some(2), Some(2), Stage::Zero3), Ok(Some(2)));
    }

    #[test]
    fn ranks_that_cut_the_model_are_taken_first() {
        let cut = Parallel { tp: 2, cp: 2, zero: Stage::Zero1, ..Parallel::default() };
        let shard = |parallel: &Parallel, ranks| {
            parallel.shard_options(ranks, Path::new("exp")).map(|options| options.unwrap().shard)
        };
        assert_eq!(shard(&cut, 8).unwrap(), Some(2));
        let error = shard(&cut, 6).unwrap_err().to_string();
        assert_eq!(
            error,
            "PARALLEL.TP does not fit: PARALLEL.TP 2 with PARALLEL.CP 2 are 4 ranks, and the job has 6; try a product among the \
             divisors of 6: 1, 2, 3, 6"
        );
        let error = shard(&Parallel { dp: Some(4), ..cut.clone() }, 8).unwrap_err().to_string();
        assert!(
            error.contains("and the job has 2 (8 / PARALLEL.TP 2 / PARALLEL.CP 2); try divisors of 2"),
            "{error}"
        );
        let heads = |count, has_cp| Cuts {
            heads: Some(Heads { key: "MODEL.N_HEAD", count, has_cp }),
            layers: Some(6),
        };
        let refused = |parallel: &Parallel, cuts| parallel.check_model(cuts).unwrap_err().to_string();
        cut.check_model(heads(6, true)).unwrap();
        let error = refused(&Parallel { tp: 4, ..cut.clone() }, heads(6, true));
        assert_eq!(
            error,
            "PARALLEL.TP is 4, which does not divide MODEL.N_HEAD 6; try a divisor: 1, 2, 3, 6"
        );
        assert!(refused(&cut, heads(6, false)).contains("only the texts of a GPT can be cut"));
        assert!(refused(&cut, Cuts::default()).contains("this model is not cut among ranks; try 1"));
        for (offloaded, key) in [
            (Parallel { offload: OffloadKind::Host, ..cut.clone() }, "PARALLEL.OFFLOAD"),
            (Parallel { offload_params: OffloadKind::Host, ..cut }, "PARALLEL.OFFLOAD_PARAMS"),
        ] {
            assert_eq!(
                offloaded.check().unwrap_err().to_string(),
                format!("{key} is host, which PARALLEL.TP 2 with PARALLEL.CP 2 does not support; try none")
            );
        }
    }

    #[test]
    fn stages_are_at_most_the_layers() {
        let cuts = Cuts { heads: None, layers: Some(6) };
        let piped = |pp, schedule| Parallel { pp, schedule, ..Parallel::default() };
        piped(6, Schedule::OneFOneB).check_model(cuts).unwrap();
        let refused = |parallel: &Parallel, cuts| parallel.check_model(cuts).unwrap_err().to_string();
        assert_eq!(
            refused(&piped(4, Schedule::ZeroBubbleV), cuts),
            "PARALLEL.PP is 4 with 2 stages a rank (PARALLEL.CHUNKS), together 8, and the model has 6 layers; try at most 3"
        );
        assert!(
            refused(&piped(2, Schedule::GPipe), Cuts::default()).contains("is not cut into stages; try 1")
        );
        let two = Parallel { chunks: Some(2), ..piped(2, Schedule::OneFOneB) };
        let error = two.check_schedule(4).unwrap_err().to_string();
        assert!(
            error.starts_with("PARALLEL.SCHEDULE is 1f1b: the schedule 1f1b has 1 stage a rank"),
            "{error}"
        );
        piped(2, Schedule::Interleaved).check_schedule(3).unwrap();
        let zero = Parallel { zero: Stage::Zero3, ..piped(2, Schedule::GPipe) };
        let error = zero.check().unwrap_err().to_string();
        assert_eq!(
            error,
            "PARALLEL.ZERO is 3, and with PARALLEL.PP 2 each rank keeps the parameters of its stages; try 2"
        );
        let error = piped(3, Schedule::GPipe).shard_options(4, Path::new("exp")).unwrap_err().to_string();
        assert_eq!(
            error,
            "PARALLEL.PP does not fit: PARALLEL.PP 3 are 3 ranks, and the job has 4; try a product among the divisors of 4: \
             1, 2, 4"
        );
    }

    #[test]
    fn a_mesh_that_does_not_fit_is_refused_with_the_divisors() {
        let error = sizes(Some(3), None, Stage::Zero3).unwrap_err();
        assert!(error.contains("PARALLEL.DP is 3 and PARALLEL.SHARD 1, together 3 ranks"), "{error}");
        assert!(error.ends_with("try divisors of 4: 1, 2, 4"), "{error}");
        assert!(sizes(None, Some(2), Stage::Zero0).unwrap_err().contains("divides nothing"));
        let reduce_in =
            Parallel { zero: Stage::Zero2, reduce_in: Some(ReduceIn::Bf16), ..Parallel::default() };
        let error = reduce_in.check().unwrap_err().to_string();
        assert_eq!(
            error,
            "PARALLEL.REDUCE_IN is bf16, and with PARALLEL.ZERO gradients keep their type; try null"
        );
        assert!(sizes(Some(0), None, Stage::Zero1).unwrap_err().contains("is 0; try 1 or more"));
    }
}
