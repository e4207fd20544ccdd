//! Filling `"auto"`, comparing with arguments, and noting mistakes.

use std::fmt::Display;

use super::Resolver;
use crate::config::deepspeed::asked::Asked;
use crate::config::deepspeed::error::Problem;
use crate::config::deepspeed::given::Argument;
use crate::config::deepspeed::keys;
use crate::config::deepspeed::plan::Became;

impl Resolver<'_> {
    /// The value of a key: that of the file, or that of an argument. If the two were given and differ, it is a mistake. A
    /// key that is not in the file takes an argument that was given, and no default: DeepSpeed has defaults of its own.
    pub(super) fn filled<T: Clone + PartialEq + Display>(
        &mut self,
        key: &str,
        asked: Asked<T>,
        argument: Option<&Argument<T>>,
    ) -> Option<T> {
        match (asked, argument) {
            (Asked::This(value), argument) => {
                self.compare(key, &value, argument);
                Some(value)
            }
            (Asked::Auto, Some(argument)) => {
                self.became(key, &argument.value, &argument.name);
                Some(argument.value.clone())
            }
            (Asked::Nothing, Some(argument)) if !argument.is_default => Some(argument.value.clone()),
            (Asked::Auto | Asked::Nothing, _) => None,
        }
    }

    /// Notes a mistake if an argument was given that differs from the file.
    pub(super) fn compare<T: PartialEq + Display>(
        &mut self,
        key: &str,
        value: &T,
        argument: Option<&Argument<T>>,
    ) {
        if let Some(Argument { value: other, name, .. }) =
            argument.filter(|argument| !argument.is_default && argument.value != *value)
        {
            let what = format!("is {value}, and {name} is {other}; try \"auto\" here, or only one of them");
            self.problem(key, what);
        }
    }

    /// Notes what an `"auto"` became.
    pub(super) fn became(&mut self, key: &str, value: impl Display, from: impl Display) {
        let became = Became { key: key.to_owned(), value: value.to_string(), from: from.to_string() };
        self.autos.push(became);
    }

    /// Fills an `"auto"` for which nothing is given with a default.
    pub(super) fn by_default<T: Display>(&mut self, key: &str, value: T) -> T {
        self.became(key, &value, "the default");
        value
    }

    /// Notes that an `"auto"` cannot be filled.
    pub(super) fn nothing_given(&mut self, key: &str) {
        self.problem(key, "is \"auto\", and nothing is given from which it follows; try a number");
    }

    /// Notes a mistake. `what` continues the sentence that the key begins.
    pub(super) fn problem(&mut self, key: &str, what: impl Into<String>) {
        let at = self.config.setting(key).map(|setting| setting.at);
        self.problems.push(Problem { key: key.to_owned(), at, what: what.into() });
    }

    /// Notes that all keys of the file below a path have no effect.
    pub(super) fn inactive(&mut self, path: &str, why: &str) {
        let is_meant =
            |key: &str| key.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let found = self.config.settings().iter().filter_map(|setting| setting.key());
        let meant = found.filter(|key| is_meant(key.path)).map(|key| (key.path, why.to_owned()));
        self.inactive.extend(meant);
    }

    /// Whether a key that is either on or off is on.
    pub(super) fn is_on(&self, key: &str) -> bool {
        self.config.is_on(key)
    }

    /// Fills each `"auto"` that no rule has filled, with DeepSpeed's default.
    pub(super) fn fill_rest(&mut self) {
        let autos = self.config.settings().iter().filter_map(|setting| setting.key());
        let is_auto = |path: &str| self.config.asked(path, |_| Some(())).is_auto();
        let is_new = |path: &str| {
            !self.autos.iter().any(|became| became.key == path)
                && !self.problems.iter().any(|problem| problem.key == path)
        };
        let rest: Vec<_> = autos.filter(|key| is_auto(key.path) && is_new(key.path)).collect();
        for key in rest {
            let (value, from) = self.of_hidden_size(key).unwrap_or_else(|| default_of(key));
            self.became(key.path, value, from);
        }
    }

    /// The sizes that Hugging Face derives from the size of the model's hidden states.
    fn of_hidden_size(&self, key: &keys::Key) -> Option<(String, String)> {
        let hidden = self.given.hidden_size?;
        let value = match key.path {
            "zero_optimization.reduce_bucket_size" => hidden * hidden,
            "zero_optimization.stage3_prefetch_bucket_size" => (0.9 * (hidden * hidden) as f64) as u64,
            "zero_optimization.stage3_param_persistence_threshold" => 10 * hidden,
            _ => return None,
        };
        Some((value.to_string(), format!("hidden size {hidden}")))
    }
}

fn default_of(key: &keys::Key) -> (String, String) {
    let value = if key.default.is_empty() { "not set" } else { key.default };
    (value.to_owned(), "the default".to_owned())
}
