//! The triangle of batch sizes: `train_batch_size = micro-batch × accumulation × ranks`.
//!
//! The file's numbers come first, then arguments that were given. Then one missing size follows from the other two. Only
//! after that are defaults used, and an accumulation of 1.

use super::Resolver;
use crate::config::deepspeed::asked::Asked;
use crate::config::deepspeed::given::Argument;
use crate::config::deepspeed::plan::BatchPlan;

const TRAIN: &str = "train_batch_size";
const MICRO: &str = "train_micro_batch_size_per_gpu";
const ACCUMULATION: &str = "gradient_accumulation_steps";

/// The three sizes, as far as they are known.
#[derive(Clone, Copy)]
struct Sizes {
    train: Option<u64>,
    micro: Option<u64>,
    accumulation: Option<u64>,
}

impl Resolver<'_> {
    pub(super) fn batch(&mut self) -> BatchPlan {
        let num_ranks = self.given.num_ranks.max(1);
        let [train, micro, accumulation] = [TRAIN, MICRO, ACCUMULATION].map(|key| self.size(key));
        let given = self.given;
        let (of_micro, of_accumulation) = (given.micro_batch.as_ref(), given.accumulation.as_ref());
        let mut sizes = Sizes {
            train: train.value(),
            micro: self.explicit(MICRO, micro, of_micro),
            accumulation: self.explicit(ACCUMULATION, accumulation, of_accumulation),
        };
        self.derive(&mut sizes, num_ranks);
        if sizes.micro.is_none() {
            sizes.micro = self.fallback(MICRO, micro, of_micro);
            self.derive(&mut sizes, num_ranks);
        }
        if sizes.accumulation.is_none() && sizes.train.is_none() {
            let argument = self.fallback(ACCUMULATION, accumulation, of_accumulation);
            sizes.accumulation = Some(argument.unwrap_or_else(|| self.one(accumulation)));
        }
        // DeepSpeed: only train_batch_size is given.
        if sizes.train.is_some() && sizes.micro.is_none() && sizes.accumulation.is_none() {
            sizes.accumulation = Some(self.one(accumulation));
        }
        self.derive(&mut sizes, num_ranks);
        self.fitting(sizes, num_ranks)
    }

    /// A size of the file; 0 is a mistake.
    fn size(&mut self, key: &'static str) -> Asked<u64> {
        let asked = self.config.whole(key);
        if asked == Asked::This(0) {
            self.problem(key, "is 0; try 1 or more");
            return Asked::Nothing;
        }
        asked
    }

    /// The file's value, or that of an argument that was given.
    fn explicit(&mut self, key: &str, asked: Asked<u64>, argument: Option<&Argument<u64>>) -> Option<u64> {
        self.filled(key, asked, argument.filter(|argument| !argument.is_default))
    }

    /// The value of an argument that is a default.
    fn fallback(&mut self, key: &str, asked: Asked<u64>, argument: Option<&Argument<u64>>) -> Option<u64> {
        let argument = argument?;
        if asked.is_auto() {
            self.became(key, argument.value, &argument.name);
        }
        Some(argument.value)
    }

    fn one(&mut self, asked: Asked<u64>) -> u64 {
        if asked.is_auto() { self.by_default(ACCUMULATION, 1) } else { 1 }
    }

    /// Derives the size that is missing, if it is only one. Sizes that do not divide stay missing.
    fn derive(&mut self, sizes: &mut Sizes, num_ranks: u64) {
        let is_auto = |key: &str| self.config.whole(key).is_auto();
        let (key, value, rule) = match *sizes {
            Sizes { train: None, micro: Some(micro), accumulation: Some(accumulation) } => {
                let train = micro.saturating_mul(accumulation).saturating_mul(num_ranks);
                sizes.train = Some(train);
                (TRAIN, train, format!("{micro} × {accumulation} × {num_ranks} ranks"))
            }
            Sizes { train: Some(train), micro: Some(micro), accumulation: None } => {
                let Some(steps) = divided(train, micro.saturating_mul(num_ranks)) else { return };
                sizes.accumulation = Some(steps);
                (ACCUMULATION, steps, format!("{train} ÷ ({micro} × {num_ranks} ranks)"))
            }
            Sizes { train: Some(train), micro: None, accumulation: Some(steps) } => {
                let Some(micro) = divided(train, steps.saturating_mul(num_ranks)) else { return };
                sizes.micro = Some(micro);
                (MICRO, micro, format!("{train} ÷ ({steps} × {num_ranks} ranks)"))
            }
            _ => return,
        };
        if is_auto(key) {
            self.became(key, value, rule);
        }
    }

    /// The plan; a mistake if sizes are missing or do not fit.
    fn fitting(&mut self, sizes: Sizes, num_ranks: u64) -> BatchPlan {
        let Sizes { train, micro, accumulation } = sizes;
        let plan = |train_batch, micro_batch, accumulation| BatchPlan {
            train_batch,
            micro_batch,
            accumulation,
            num_ranks,
        };
        match (train, micro, accumulation) {
            (Some(train), Some(micro), Some(steps)) => {
                if product(micro, steps, num_ranks) != u128::from(train) {
                    self.contradiction([train, micro, steps], num_ranks);
                }
                plan(train, micro, steps)
            }
            (Some(train), Some(micro), None) => {
                self.indivisible(train, Divisor { name: "micro-batch", size: micro }, num_ranks);
                plan(train, micro, 1)
            }
            (Some(train), None, Some(steps)) => {
                self.indivisible(train, Divisor { name: "accumulation", size: steps }, num_ranks);
                plan(train, 1, steps)
            }
            _ => {
                self.missing();
                plan(num_ranks, 1, 1)
            }
        }
    }

    fn missing(&mut self) {
        let auto = [MICRO, TRAIN].into_iter().find(|key| self.config.whole(key).is_auto());
        match auto {
            Some(key) => self.nothing_given(key),
            None if self.problems.iter().any(|problem| [TRAIN, MICRO].contains(&problem.key.as_str())) => {}
            None => self.problem(MICRO, format!("is not given, and {TRAIN} is not either; try one of them")),
        }
    }

    fn contradiction(&mut self, [train, micro, steps]: [u64; 3], num_ranks: u64) {
        let all = product(micro, steps, num_ranks);
        let mut fits = vec![format!("{TRAIN} {all}")];
        fits.extend(
            divided(train, micro.saturating_mul(num_ranks)).map(|steps| format!("{ACCUMULATION} {steps}")),
        );
        fits.extend(divided(train, steps.saturating_mul(num_ranks)).map(|micro| format!("{MICRO} {micro}")));
        fits.extend(divided(train, micro.saturating_mul(steps)).map(|ranks| format!("{ranks} ranks")));
        let what = format!(
            "is {train}, but micro-batch {micro} × accumulation {steps} × {num_ranks} ranks is {all}; try {}",
            fits.join(", or ")
        );
        self.problem(TRAIN, what);
    }

    fn indivisible(&mut self, train: u64, Divisor { name, size }: Divisor, num_ranks: u64) {
        let unit = size.saturating_mul(num_ranks);
        let below = train / unit * unit;
        let below = if below == 0 { String::new() } else { format!("{below} or ") };
        let what = format!(
            "is {train}, which {name} {size} × {num_ranks} ranks = {unit} does not divide; try {TRAIN} {below}{}",
            (train / unit + 1).saturating_mul(unit)
        );
        self.problem(TRAIN, what);
    }
}

/// One of the sizes by which the whole batch is divided.
struct Divisor {
    name: &'static str,
    size: u64,
}

/// `all / part`, if it is whole and not 0.
fn divided(all: u64, part: u64) -> Option<u64> {
    (part > 0 && all > 0 && all.is_multiple_of(part)).then(|| all / part)
}

fn product(micro: u64, steps: u64, num_ranks: u64) -> u128 {
    u128::from(micro).saturating_mul(u128::from(steps)).saturating_mul(u128::from(num_ranks))
}
