//! Why the steps of a training stay eager.

use drumline_parallel::{Engine, NotRecordable};
use drumline_torch::{LossScaler, TensorCollectives, TorchError};

use crate::trainer::step_mode::NeverGraph;

/// Why the steps of a training stay eager.
#[derive(Debug, thiserror::Error)]
pub(super) enum StayEager {
    #[error(transparent)]
    Steps(NeverGraph),
    #[error(transparent)]
    Communication(#[from] NotRecordable),
    #[error("{cause}")]
    Recording { cause: String },
    #[error(transparent)]
    Torch(TorchError),
}

/// An error if a step of this engine cannot be recorded, because of its communication or where its state lies.
pub(super) fn check_recordable(engine: &dyn Engine, scaler: Option<&LossScaler>) -> Result<(), StayEager> {
    engine.is_recordable()?;
    let whole = engine.mesh().whole();
    if engine.communicates() && scaler.is_some() && whole.size() > 1 {
        whole.is_recordable().map_err(NotRecordable::from)?;
    }
    Ok(())
}

/// The text without libtorch's stack trace. In the message of a panic a line break is two characters.
pub(super) fn first_line(text: &str) -> &str {
    let end = [text.find('\n'), text.find("\\n")].into_iter().flatten().min();
    text[..end.unwrap_or(text.len())].trim_end()
}

#[cfg(test)]
mod tests {
    use drumline_comm::{Mesh, ProcessGroup};
    use drumline_parallel::{EngineOptions, EngineSetup, Offload, Place, ShardOptions};
    use drumline_plan::Stage;
    use drumline_torch::{AdamOptions, AdamW, parameters};
    use tch::Device;
    use tch::nn::{VarStore, linear};

    use super::*;

    /// A rank that communicates with no other is asked as well: a recorded step of offloaded state would fail for good.
    #[test]
    fn a_rank_alone_is_recorded_unless_its_state_is_offloaded() {
        let decided = |offload: Offload| {
            let store = VarStore::new(Device::Cpu);
            let _layer = linear(store.root(), 40, 40, Default::default());
            let mut optimizer = AdamW::new(parameters(&store), AdamOptions::default()).unwrap();
            let options = ShardOptions { offload, ..ShardOptions::new(Stage::Zero0) };
            let mesh = Mesh::new(&ProcessGroup::from_env().unwrap(), options.mesh_shape(1).unwrap()).unwrap();
            let engine = Box::new(options).engine(EngineSetup::new(&store, &mesh)).unwrap();
            engine.adopt(&mut optimizer).unwrap();
            assert!(!engine.communicates());
            check_recordable(&*engine, None).map_err(|why| why.to_string())
        };
        assert_eq!(decided(Offload::default()), Ok(()));
        let host = Offload { optimizer: Place::Host, mimics_gpu: true, ..Offload::default() };
        let why = decided(host).unwrap_err();
        assert_eq!(why, NotRecordable::OffloadedState.to_string());
    }

    #[test]
    fn a_reason_is_one_line() {
        assert_eq!(first_line("plain"), "plain");
        assert_eq!(first_line("first \nsecond"), "first");
        let panic =
            format!("panicked: {:?}", "not permitted when stream is capturing\nException raised from …\n");
        assert_eq!(first_line(&panic), "panicked: \"not permitted when stream is capturing");
    }
}
