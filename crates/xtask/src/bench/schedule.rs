//! The order of contenders within a block: rotated from block to block, every second one backwards (A B C, A C B, …),
//! so that none is always first and none always follows the same neighbour.

/// The indices of `count` contenders in the order of this block.
pub(crate) fn order(count: usize, block: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    if count > 0 {
        order.rotate_left(block / 2 % count);
    }
    if block % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_rotate_and_turn_round() {
        assert_eq!(order(3, 0), [0, 1, 2]);
        assert_eq!(order(3, 1), [2, 1, 0]);
        assert_eq!(order(3, 2), [1, 2, 0]);
        assert_eq!(order(3, 3), [0, 2, 1]);
        assert!(order(0, 4).is_empty());
    }

    #[test]
    fn every_block_holds_everyone() {
        for (count, block) in (1..6).flat_map(|c| (0..12).map(move |b| (c, b))) {
            let mut all = order(count, block);
            all.sort_unstable();
            assert_eq!(all, (0..count).collect::<Vec<_>>());
        }
    }
}
