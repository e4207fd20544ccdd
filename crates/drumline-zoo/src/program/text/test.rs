//! `drumline-train test` on text: the figures of `TEXT.TEST`, over all ranks, each text once.

use anyhow::Context;
use drumline::trainer::{Batch, Loss};
use drumline::{Dataset, Loader, LoaderOptions, Metric, ReduceOp};
use tch::nn::{ModuleT, VarStore};
use tch::{Device, no_grad};

use super::parts;
use crate::program::args::TestArgs;
use crate::program::job::{Job, say};
use crate::program::pieces::Percent;
use crate::program::shown::TEXTS;
use crate::program::test::{Given, OfRun, Weights};
use crate::text::{Lexicon, Task, TextConfig, TextData, Texts, figures, loss};

/// Evaluates as the command line says, and prints one line on rank 0.
pub(in crate::program) fn test(args: &TestArgs) -> anyhow::Result<()> {
    let config = checked(args);
    let job = Job::join()?;
    let config = job.agree(config)?;
    job.say_hello();
    let lexicon = Lexicon::read_by_all(&job.group, &config.run.out_dir)?;
    let data = job.agree(data(&config, &lexicon))?;
    let device = job.device(config.run.device)?;
    let store = VarStore::new(device);
    let net = job.agree(parts::net(&config, &lexicon, &store))?;
    let weights = weights_of(&config, args);
    let weights = weights.load(&job, &config.run, &store)?;
    let texts = data.len();
    let evaluated = evaluate(&job, (&config, &lexicon), data, (&*net, device))?;
    let [(_, loss), figures @ ..] = &evaluated[..] else { unreachable!("the loss comes first") };
    if job.is_first() {
        let figures = TEXTS.evaluated(figures);
        say(&format!("   == test: loss: {loss:.4}{figures} | {texts} texts | {weights}"));
    }
    Ok(())
}

fn weights_of<'a>(config: &'a TextConfig, args: &TestArgs) -> Weights<'a> {
    let file = config.model.weights.as_deref();
    Weights { file, is_untrained: false, given: Given::of(&args.run.pairs), of_run: OfRun::Best }
}

/// An error if the configuration is wrong, files that it names are not there, or there is nothing to evaluate.
pub(in crate::program) fn check_test(args: &TestArgs) -> anyhow::Result<()> {
    let config = checked(args)?;
    weights_of(&config, args).check(&config.run)?;
    Ok(Lexicon::read(&config.run.out_dir).map(drop)?)
}

fn checked(args: &TestArgs) -> anyhow::Result<TextConfig> {
    let config = parts::checked(&args.run)?;
    let test = config.text.test.as_ref().context("TEXT.TEST is not given, nor TEXT.DEV; try a file")?;
    parts::check_file("TEXT.TEST", test)?;
    Ok(config)
}

fn data(config: &TextConfig, lexicon: &Lexicon) -> anyhow::Result<TextData> {
    let keys = &config.text;
    let test = keys.test.as_ref().context("TEXT.TEST was checked")?;
    let max_len = keys.max_len.filter(|_| keys.task == Task::Classify);
    Ok(TextData::new(&Texts::read(test, keys)?, lexicon, keys.task, max_len)?)
}

/// The loss and the figures, in percent; the same on all ranks.
fn evaluate(
    job: &Job,
    (config, lexicon): (&TextConfig, &Lexicon),
    data: TextData,
    (net, device): (&dyn ModuleT, Device),
) -> anyhow::Result<Vec<(String, f64)>> {
    let batch_size = config.test.batch_size;
    let sampler = data.sampler(parts::plan_of_evaluation(batch_size), job.place())?;
    let options = LoaderOptions { batch_size, workers: config.train.workers, ..LoaderOptions::default() };
    let loader = Loader::new(data, sampler, options)?;
    let mut own = Sums {
        loss: [0.0; 2],
        figures: figures(config.text.task, &lexicon.labels)
            .into_iter()
            .map(|(name, figure)| (name, Percent(figure)))
            .collect(),
    };
    let share = no_grad(|| own.share(job, config, &loader, (net, device)));
    job.agree(share)?;
    let is_cut = job.stop.agreed(&job.group)?;
    job.agree((!is_cut).then_some(()).context("asked to stop before the end"))?;
    own.reduced(job)
}

/// A rank's own.
struct Sums {
    loss: [f64; 2],
    figures: Vec<(&'static str, Percent<Box<dyn Metric>>)>,
}

impl Sums {
    fn share(
        &mut self,
        job: &Job,
        config: &TextConfig,
        loader: &Loader<TextData>,
        (net, device): (&dyn ModuleT, Device),
    ) -> anyhow::Result<()> {
        let boxed = |cause: drumline::Cause| anyhow::anyhow!(cause);
        let loss = loss(config.text.task);
        for batch in loader.epoch(0) {
            if job.stop.is_requested() {
                break;
            }
            let batch = batch?.to_device(device)?;
            let output = net.forward_t(&batch.0, false);
            self.loss[0] += loss.sum(&output, &batch).map_err(boxed)?.double_value(&[]);
            self.loss[1] += Loss::<_, tch::Tensor>::count(&loss, &batch).map_err(boxed)?;
            for (_, figure) in &mut self.figures {
                figure.update(&output, &batch.1)?;
            }
        }
        Ok(())
    }

    fn reduced(&self, job: &Job) -> anyhow::Result<Vec<(String, f64)>> {
        let mut loss = self.loss;
        job.group.all_reduce(&mut loss, ReduceOp::Sum)?;
        let mut all = vec![("loss".to_owned(), loss[0] / loss[1])];
        for (name, figure) in &self.figures {
            all.push(((*name).to_owned(), figure.reduce(&job.group)?));
        }
        Ok(all)
    }
}
