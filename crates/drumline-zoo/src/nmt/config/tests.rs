//! What a configuration of NJUNMT refuses.

use super::*;

#[test]
fn amsgrad_of_an_optimizer_without_it_is_refused() {
    let refused = |optimizer| {
        let mut config = NmtConfig::default();
        config.optimizer.optimizer = optimizer;
        config.optimizer_params.amsgrad = true;
        let text = config.check().unwrap_err().to_string();
        text.contains("amsgrad").then_some(text)
    };
    let expected = "optimizer_configs.optimizer_params.amsgrad is true, and sgd has none; try \
                    optimizer_configs.optimizer adamw";
    // The default names no files, which is checked after it.
    assert_eq!(refused(OptimizerName::Sgd).as_deref(), Some(expected));
    assert_eq!(refused(OptimizerName::Adam), None);
}
