//! What is left for people and programs to look at.

use drumline::ProcessGroup;
use drumline::trainer::{EventFile, LoadBestModel, Plots, RankFiles, TensorBoard};
use drumline_observe::events::{self, Event, Reason};
use drumline_observe::status::{self, State};
use rank_test::ranks_test;
use tch::Device;
use tch::nn::VarStore;

use super::{Net, data, trainer};

ranks_test!(a_training_leaves_its_story_its_ranks_and_its_curves, 2, {
    let group = ProcessGroup::from_env()?;
    let folder = (group.rank() == 0).then(tempfile::tempdir).transpose()?;
    let out = group.broadcast_object(folder.as_ref().map(|folder| folder.path().to_owned()).as_ref(), 0)?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 16)?
        .dev_data(data(6))
        .batch_size_per_gpu(2)
        .n_epochs(2)
        .callback(RankFiles::in_folder(&out))
        .master_callback(EventFile::in_folder(&out))
        .master_callback(TensorBoard::in_folder(out.join("tensorboard")).gradients_every(4))
        .master_callback(Plots::in_folder(&out));
    trainer.train(LoadBestModel::No)?;
    group.barrier()?;

    let ranks = status::read(&out);
    assert_eq!(ranks.iter().map(|rank| (rank.rank, rank.step)).collect::<Vec<_>>(), [(0, 8), (1, 8)]);
    assert!(ranks.iter().all(|rank| rank.state == State::Ended && rank.compute_s > 0.0), "{ranks:?}");
    if group.rank() == 0 {
        let story = events::read(&out.join("metrics.jsonl"))?;
        let kind = |event: &Event| match event {
            Event::Run(_) => 'r',
            Event::Step(_) => 's',
            Event::Eval(_) => 'e',
            Event::End(_) => '.',
        };
        assert_eq!(story.iter().map(kind).collect::<String>(), "rssssesssse.");
        assert!(
            matches!(story.last(), Some(Event::End(end)) if end.reason == Reason::Finished && end.step == 8)
        );
        assert!(std::fs::read_to_string(out.join("curves.svg"))?.contains("<svg"));
        assert_eq!(std::fs::read_dir(out.join("tensorboard"))?.count(), 1);
    }
    group.barrier()?;
});
