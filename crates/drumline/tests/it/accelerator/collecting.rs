//! What ranks have, put together: nothing is counted twice.

use drumline::ReduceOp;
use drumline::accelerator::{PadAt, Padding};
use rank_test::ranks_test;
use tch::Kind;

use super::*;

/// Samples that know their index.
fn indices(len: usize) -> impl Dataset<Batch = Pair> + 'static {
    drumline::data::MapDataset::new(
        len,
        |at: drumline::data::Sample| Ok((Tensor::from(at.index as i64), at.index as i64)),
        collate,
    )
}

fn gathers_each_sample_once() -> anyhow::Result<()> {
    let accelerator = Accelerator::new()?;
    for len in [0, 1, 5, 12, SAMPLES] {
        let loader = accelerator.prepare_loader(whole(indices(len), 3)?)?;
        let (mut gathered, mut padded, mut sums) = (Vec::new(), 0, 0.0);
        for batch in loader.epoch(1) {
            let (index, class) = batch?;
            gathered.extend(Vec::<i64>::try_from(accelerator.gather_for_metrics(&index)?)?);
            let rows = class.unsqueeze(1).repeat([1, 2]).to_kind(Kind::Float);
            sums += accelerator.gather_for_metrics(&rows)?.sum(Kind::Double).double_value(&[]);
            padded += accelerator.gather(&index)?.size()[0] as usize;
        }
        let expected: Vec<_> = order(len, 1).into_iter().map(|index| index as i64).collect();
        assert_eq!(gathered, expected, "each once, in the order of one process");
        assert_eq!(sums, (len * len.saturating_sub(1)) as f64);
        // The control: where a rank had nothing left, what it was given would have been counted.
        assert_eq!(padded > len, loader.is_uneven(), "{padded} of {len}");
    }
    Ok(())
}

ranks_test!(one_rank_gathers_each_sample_once, 1, { gathers_each_sample_once()? });
ranks_test!(two_ranks_gather_each_sample_once, 2, { gathers_each_sample_once()? });
ranks_test!(four_ranks_gather_each_sample_once, 4, { gathers_each_sample_once()? });

ranks_test!(tensors_are_gathered_reduced_and_padded, 3, {
    let accelerator = Accelerator::new()?;
    let rank = accelerator.process_index() as i64;
    let own = Tensor::full([rank + 1], rank, (Kind::Int64, Device::Cpu));
    assert_eq!(accelerator.gather(&own)?, Tensor::from_slice(&[0i64, 1, 1, 2, 2, 2]));
    assert_eq!(accelerator.gather(&Tensor::from(rank))?, Tensor::from_slice(&[0i64, 1, 2]), "a number");
    assert_eq!(
        accelerator.gather_for_metrics(&Tensor::from(rank))?.size(),
        [3],
        "outside loops nothing is left out"
    );
    let number = Tensor::from_slice(&[rank as f32]);
    assert_eq!(accelerator.reduce(&number, ReduceOp::Sum)?, Tensor::from_slice(&[3f32]));
    assert_eq!(accelerator.reduce(&number, ReduceOp::Avg)?, Tensor::from_slice(&[1f32]));
    assert_eq!(number, Tensor::from_slice(&[rank as f32]), "it is left as it was");
    let padded = accelerator.pad_across_processes(&own, Padding { value: 9.0, ..Padding::default() })?;
    let expected: [i64; 3] = std::array::from_fn(|place| if place as i64 <= rank { rank } else { 9 });
    assert_eq!(padded, Tensor::from_slice(&expected));
    let wide = Tensor::ones([2, rank + 1], (Kind::Float, Device::Cpu));
    let padded = accelerator
        .pad_across_processes(&wide, Padding { dim: -1, at: PadAt::Begin, ..Default::default() })?;
    assert_eq!(
        (padded.size(), padded.sum(Kind::Float).double_value(&[])),
        (vec![2, 3], 2.0 * (rank + 1) as f64)
    );
    assert_eq!(padded.double_value(&[0, 2]), 1.0);
    let message =
        accelerator.pad_across_processes(&own, Padding { dim: 1, ..Default::default() }).unwrap_err();
    assert!(message.to_string().contains("cannot pad along dimension 1"), "{message}");
    accelerator.wait_for_everyone()?;
});
