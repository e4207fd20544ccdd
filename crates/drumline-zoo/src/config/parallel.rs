//! `PARALLEL`: how the ranks of a job train one model together.

use drumline::engine::{CommHook, Compressed, ShardOptions, Stage};
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
        /// With ZERO 3, parameters of at most this many elements stay gathered
        "KEEP_GATHERED" keep_gathered: usize = 100_000;
        /// With ZERO 0, data type in which gradients are sent; null: their own
        "REDUCE_IN" reduce_in: Option<ReduceIn> = None;
    }
}

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

impl Parallel {
    /// Returns an error for values that fit no number of ranks.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let Self { zero, dp, shard, reduce_in, .. } = *self;
        for (key, value) in [("PARALLEL.DP", dp), ("PARALLEL.SHARD", shard)] {
            if value == Some(0) {
                return invalid(key, "is 0; try 1 or more, or null");
            }
        }
        if let Some(kind) = reduce_in.filter(|_| zero != Stage::Zero0) {
            let what = format!("is {}, and with PARALLEL.ZERO gradients keep their type; try null", kind.name());
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
        Ok(())
    }

    /// The options of the sharded engine for a number of ranks; `None` for DDP.
    pub(crate) fn shard_options(&self, num_ranks: usize) -> Result<Option<ShardOptions>, ConfigError> {
        let Self { zero, dp, shard, keep_gathered, .. } = *self;
        let (dp, shard) = match (dp, shard) {
            (None, None) if zero == Stage::Zero0 => (num_ranks, 1),
            (None, None) => (1, num_ranks),
            (Some(dp), None) => (dp, num_ranks / dp),
            (None, Some(shard)) => (num_ranks / shard, shard),
            (Some(dp), Some(shard)) => (dp, shard),
        };
        if dp * shard != num_ranks || (zero == Stage::Zero0 && shard > 1) {
            let what = format!(
                "is {dp} and PARALLEL.SHARD {shard}, together {} ranks, and the job has {num_ranks}; try divisors of {num_ranks}: {}",
                dp * shard,
                divisors(num_ranks)
            );
            return invalid("PARALLEL.DP", what).map(|()| None);
        }
        let options = ShardOptions { shard: Some(shard), keep_gathered, ..ShardOptions::new(zero) };
        Ok((zero != Stage::Zero0).then_some(options))
    }
}

fn divisors(number: usize) -> String {
    let divisors = (1..=number).filter(|divisor| number.is_multiple_of(*divisor));
    divisors.map(|divisor| divisor.to_string()).collect::<Vec<_>>().join(", ")
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
        parallel.check().map_err(|error| error.to_string())?;
        let options = parallel.shard_options(4).map_err(|error| error.to_string())?;
        Ok(options.and_then(|options| options.shard))
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
    fn a_mesh_that_does_not_fit_is_refused_with_the_divisors() {
        let error = sizes(Some(3), None, Stage::Zero3).unwrap_err();
        assert!(error.contains("PARALLEL.DP is 3 and PARALLEL.SHARD 1, together 3 ranks"), "{error}");
        assert!(error.ends_with("try divisors of 4: 1, 2, 4"), "{error}");
        assert!(sizes(None, Some(2), Stage::Zero0).unwrap_err().contains("divides nothing"));
        let reduce_in = Parallel { zero: Stage::Zero2, reduce_in: Some(ReduceIn::Bf16), ..Parallel::default() };
        let error = reduce_in.check().unwrap_err().to_string();
        assert_eq!(
            error,
            "PARALLEL.REDUCE_IN is bf16, and with PARALLEL.ZERO gradients keep their type; try null"
        );
        assert!(sizes(Some(0), None, Stage::Zero1).unwrap_err().contains("is 0; try 1 or more"));
    }
}
