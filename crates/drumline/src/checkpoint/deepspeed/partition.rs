//! Which stretches of the ranks' flat tensors make up each parameter. Pure functions.
//!
//! ```text
//!   stages 1, 2   a group's parameters follow each other, and the whole is cut in equal parts, padded at the end
//!                 rank 0: aaaaab   rank 1: bbbcc0
//!   stage 3       each parameter is cut in as many parts as there are ranks, its last part padded
//!                 rank 0: aaabbc   rank 1: aa0bbc
//! ```

/// A parameter that DeepSpeed trained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Param {
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
}

impl Param {
    fn numel(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// Elements of a flat tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) rank: usize,
    /// The flat tensor among those of the rank.
    pub(super) group: usize,
    pub(super) first: u64,
    pub(super) len: u64,
}

/// A parameter, and the pieces that make it up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) param: Param,
    pub(super) pieces: Vec<Piece>,
}

/// Why flat tensors do not make up the parameters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Misfit {
    #[error("rank {rank} has saved {found} groups of parameters, expected {expected}")]
    Groups { rank: usize, found: usize, expected: usize },
    #[error("the parameters of group {group} have {needed} elements, and the ranks have saved {found}")]
    Length { group: usize, needed: u64, found: u64 },
    #[error("rank {rank} has saved {found} elements of group {group}, and rank 0 has saved {expected}")]
    Uneven { rank: usize, group: usize, found: u64, expected: u64 },
    #[error("`{param}` does not end where group {group} ends")]
    Straddles { param: String, group: usize },
}

type Result<T> = std::result::Result<T, Misfit>;

/// Stages 1 and 2: `groups` are the parameters of each group, `lens` the elements that each rank has saved of each.
pub(super) fn of_groups(groups: &[Vec<Param>], lens: &[Vec<u64>]) -> Result<Vec<Cut>> {
    if let Some(rank) = lens.iter().position(|lens| lens.len() != groups.len()) {
        return Err(Misfit::Groups { rank, found: lens[rank].len(), expected: groups.len() });
    }
    let mut cuts = Vec::new();
    for (group, params) in groups.iter().enumerate() {
        let parts: Vec<u64> = lens.iter().map(|lens| lens[group]).collect();
        let (mut offset, found) = (0u64, parts.iter().sum());
        for param in params {
            let end = offset.saturating_add(param.numel());
            cuts.push(Cut { param: param.clone(), pieces: pieces(&parts, group, offset..end) });
            offset = end;
        }
        // DeepSpeed pads a group to a multiple of two elements of each rank, or leaves the padding away.
        let aligned = |elements: u64| elements.div_ceil(2 * lens.len().max(1) as u64);
        if offset > found || aligned(offset) != aligned(found) {
            return Err(Misfit::Length { group, needed: offset, found });
        }
    }
    Ok(cuts)
}

/// The pieces of a range of the whole that these parts make up.
fn pieces(parts: &[u64], group: usize, range: std::ops::Range<u64>) -> Vec<Piece> {
    let (mut start, mut pieces) = (0, Vec::new());
    for (rank, len) in parts.iter().enumerate() {
        let (first, end) = (range.start.max(start), range.end.min(start + len));
        if first < end {
            pieces.push(Piece { rank, group, first: first - start, len: end - first });
        }
        start += len;
    }
    pieces
}

/// Stage 3: each rank's groups have an equal part of each parameter. Groups are filled one after the other.
pub(super) fn of_each(params: &[Param], lens: &[Vec<u64>]) -> Result<Vec<Cut>> {
    let Some((first, others)) = lens.split_first() else { return Ok(Vec::new()) };
    for (place, other) in others.iter().enumerate() {
        same_lens(first, other, place + 1)?;
    }
    let (ranks, mut group, mut offset, mut cuts) = (lens.len() as u64, 0, 0, Vec::new());
    for param in params {
        let (numel, share) = (param.numel(), param.numel().div_ceil(ranks));
        while share > 0 && first.get(group).is_some_and(|len| offset == *len) {
            (group, offset) = (group + 1, 0);
        }
        let Some(end) = first.get(group).copied().or((share == 0).then_some(0)) else {
            let needed = params.iter().map(Param::numel).sum();
            return Err(Misfit::Length { group, needed, found: first.iter().sum::<u64>() * ranks });
        };
        if offset + share > end {
            return Err(Misfit::Straddles { param: param.name.clone(), group });
        }
        let piece = |rank: u64| {
            let len = numel.saturating_sub(rank * share).min(share);
            Piece { rank: rank as usize, group, first: offset, len }
        };
        let pieces = (0..ranks).map(piece).filter(|piece| piece.len > 0).collect();
        cuts.push(Cut { param: param.clone(), pieces });
        offset += share;
    }
    let left = first.iter().skip(group).sum::<u64>() - offset.min(first.get(group).copied().unwrap_or(0));
    if left > 0 {
        let needed = params.iter().map(Param::numel).sum();
        return Err(Misfit::Length { group, needed, found: first.iter().sum::<u64>() * ranks });
    }
    Ok(cuts)
}

fn same_lens(first: &[u64], other: &[u64], rank: usize) -> Result<()> {
    if first.len() != other.len() {
        return Err(Misfit::Groups { rank, found: other.len(), expected: first.len() });
    }
    match first.iter().zip(other).position(|(first, other)| first != other) {
        Some(group) => {
            let (expected, found) = (first[group], other[group]);
            Err(Misfit::Uneven { rank, group, found, expected })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn params(sizes: &[u64]) -> Vec<Param> {
        let param = |(place, size): (usize, &u64)| Param { name: place.to_string(), shape: vec![*size] };
        sizes.iter().enumerate().map(param).collect()
    }

    /// Elements of parameters by their numbers from 1 on, padding is 0.
    fn numbers(sizes: &[u64]) -> Vec<u64> {
        (1..=sizes.iter().sum()).collect()
    }

    /// What the pieces of each parameter name, in the ranks' flat tensors.
    fn joined(cuts: &[Cut], flat: &[Vec<Vec<u64>>]) -> Vec<u64> {
        let pieces = cuts.iter().flat_map(|cut| &cut.pieces);
        let of_piece = |piece: &Piece| {
            let own = &flat[piece.rank][piece.group];
            own[piece.first as usize..(piece.first + piece.len) as usize].to_vec()
        };
        pieces.flat_map(of_piece).collect()
    }

    fn lens(flat: &[Vec<Vec<u64>>]) -> Vec<Vec<u64>> {
        flat.iter().map(|groups| groups.iter().map(|group| group.len() as u64).collect()).collect()
    }

    /// As stages 1 and 2 divide one group among ranks.
    fn divided(sizes: &[u64], ranks: usize) -> Vec<Vec<Vec<u64>>> {
        let mut whole = numbers(sizes);
        whole.resize(whole.len().next_multiple_of(2 * ranks), 0);
        let part = whole.len() / ranks;
        (0..ranks).map(|rank| vec![whole[rank * part..(rank + 1) * part].to_vec()]).collect()
    }

    /// As stage 3 divides each parameter, with groups of at most `most` elements.
    fn each_divided(sizes: &[u64], ranks: usize, most: usize) -> Vec<Vec<Vec<u64>>> {
        let whole = numbers(sizes);
        let (mut start, mut flat) = (0, vec![vec![Vec::new()]; ranks]);
        for size in sizes {
            let share = size.div_ceil(ranks as u64) as usize;
            let mut param = whole[start..start + *size as usize].to_vec();
            param.resize(share * ranks, 0);
            let is_full = flat[0].last().is_some_and(|last| !last.is_empty() && last.len() + share > most);
            for (rank, groups) in flat.iter_mut().enumerate() {
                if is_full {
                    groups.push(Vec::new());
                }
                groups.last_mut().unwrap().extend(&param[rank * share..(rank + 1) * share]);
            }
            start += *size as usize;
        }
        flat
    }

    proptest! {
        #[test]
        fn parameters_are_put_together(
            sizes in prop::collection::vec(0u64..20, 0..8), ranks in 1usize..6, most in 1usize..30
        ) {
            let flat = divided(&sizes, ranks);
            let cuts = of_groups(&[params(&sizes)], &lens(&flat)).unwrap();
            prop_assert_eq!(joined(&cuts, &flat), numbers(&sizes));
            let flat = each_divided(&sizes, ranks, most);
            let cuts = of_each(&params(&sizes), &lens(&flat)).unwrap();
            prop_assert_eq!(joined(&cuts, &flat), numbers(&sizes));
            for (cut, size) in cuts.iter().zip(&sizes) {
                prop_assert_eq!(cut.pieces.iter().map(|piece| piece.len).sum::<u64>(), *size);
            }
        }

        #[test]
        fn any_lengths_are_used_or_refused(
            sizes in prop::collection::vec(0u64..9, 0..6), lens in prop::collection::vec(prop::collection::vec(0u64..20, 0..4), 0..4)
        ) {
            let _ = of_groups(&[params(&sizes)], &lens);
            let _ = of_each(&params(&sizes), &lens);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let groups = [params(&[5, 4])];
        assert_eq!(of_groups(&groups, &[vec![6], vec![6]]).unwrap().len(), 2);
        assert_eq!(of_groups(&groups, &[vec![6], vec![3]]).unwrap().len(), 2, "without padding");
        let message = |lens: &[Vec<u64>]| of_groups(&groups, lens).unwrap_err().to_string();
        assert_eq!(
            message(&[vec![4], vec![4]]),
            "the parameters of group 0 have 9 elements, and the ranks have saved 8"
        );
        assert_eq!(
            message(&[vec![8], vec![8]]),
            "the parameters of group 0 have 9 elements, and the ranks have saved 16"
        );
        assert_eq!(message(&[vec![6], vec![]]), "rank 1 has saved 0 groups of parameters, expected 1");
        let message = |lens: &[Vec<u64>]| of_each(&params(&[5, 4]), lens).unwrap_err().to_string();
        assert_eq!(of_each(&params(&[5, 4]), &[vec![5], vec![5]]).unwrap()[1].pieces[0].first, 3);
        assert!(message(&[vec![4], vec![4]]).contains("`1` does not end where group 0 ends"));
        assert!(message(&[vec![6], vec![6]]).contains("have 9 elements, and the ranks have saved 12"));
        assert!(message(&[vec![3], vec![3]]).contains("and the ranks have saved 6"));
        assert!(
            message(&[vec![5], vec![4]])
                .contains("rank 1 has saved 4 elements of group 0, and rank 0 has saved 5")
        );
    }
}
