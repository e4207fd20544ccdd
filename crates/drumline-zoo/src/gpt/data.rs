//! Windows of a token file. Windows are read on demand, so the file may be larger than memory.
//!
//! ```text
//!   tokens   t0 t1 t2 t3 t4 t5 t6 t7 t8 …       block 4
//!   window 0 └──────────┘ input t0…t3, target t1…t4
//!   window 1             └──────────┘ input t4…t7, target t5…t8
//! ```
//! Each token is a target once per epoch. In training, all windows of an epoch may be shifted by the same random
//! offset, drawn from the run's seed and the epoch, so that a token does not always have the same context. The last
//! window ends with the file. The sampler decides the order of windows and the rank of each.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drumline::data::{Cause, Dataset, Sample, SampleError};
use drumline::torch::TorchError;
use drumline_text::{GptTokenizer, TextError, TokenHeader};
use tch::{Device, Kind, Tensor};

/// Where windows begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Begin {
    /// At the same tokens in each epoch; the first window begins with the file.
    #[default]
    Fixed,
    /// Shifted by another offset in each epoch.
    Moved,
}

/// A dataset of windows: the inputs `[windows, block]`, and as targets the tokens that follow each of them.
#[derive(Debug, Clone)]
pub struct TokenData {
    path: PathBuf,
    header: TokenHeader,
    block: usize,
    begin: Begin,
    /// Threads read the file at any place. The page cache keeps what was read and gives the memory back when it is
    /// needed.
    file: Arc<File>,
}

impl TokenData {
    /// Opens a token file that `tokenizer` has made, with windows of `block` tokens.
    pub fn open(path: &Path, tokenizer: &GptTokenizer, block: usize) -> Result<Self, TextError> {
        let header = TokenHeader::open(path)?;
        let bad = |what: String| TextError::BadFile { path: path.to_owned(), what };
        if (header.vocabulary, header.tokenizer) != (tokenizer.vocabulary(), tokenizer.fingerprint()) {
            return Err(bad(format!(
                "has tokens of another vocabulary, of {} tokens, expected the {} of GPT.TOKENIZER; try the tokenizer that made \
                 it, or drumline data tokens with this one",
                header.vocabulary,
                tokenizer.vocabulary()
            )));
        }
        if header.count <= block as u64 {
            return Err(bad(format!(
                "has {} tokens, expected at least {}, one more than a window has; try more text, or a smaller MODEL.BLOCK",
                header.count,
                block + 1
            )));
        }
        let file =
            File::open(path).map_err(|source| TextError::ReadFile { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), header, block, begin: Begin::Fixed, file: Arc::new(file) })
    }

    /// Changes where windows begin.
    #[must_use]
    pub fn beginning(self, begin: Begin) -> Self {
        Self { begin, ..self }
    }

    /// The first token of a sample's window.
    fn start(&self, sample: &Sample) -> usize {
        let moved = match self.begin {
            Begin::Fixed => 0,
            Begin::Moved => sample.epoch_rng().below(self.block),
        };
        // The last token of a window is followed by a target.
        let last = self.header.count as usize - 1 - self.block;
        (sample.index * self.block + moved).min(last)
    }

    /// The header of the file.
    pub fn header(&self) -> &TokenHeader {
        &self.header
    }

    /// A fingerprint that does not read all of a large file: the header, and a checksum of some windows.
    pub fn fingerprint(&self) -> Result<String, SampleError> {
        const SAMPLED: usize = 64;
        let mut crc = crc32fast::Hasher::new();
        for look in 0..SAMPLED.min(self.len()) {
            let index = look * (self.len() - 1) / SAMPLED.min(self.len()).max(2).saturating_sub(1);
            let (tokens, _) = self.batch(&[Sample::new(0, 0, index)])?;
            let tokens = Vec::<i64>::try_from(tokens.reshape([-1]));
            let tokens = tokens.map_err(|error| SampleError::new(index, self.name(index), error))?;
            tokens.iter().for_each(|token| crc.update(&token.to_le_bytes()));
        }
        let TokenHeader { vocabulary, count, tokenizer, .. } = self.header;
        Ok(format!("{count} of {vocabulary} tokens, {tokenizer:08x}, {:08x}", crc.finalize()))
    }

    fn window_at(&self, start: usize) -> String {
        format!("the window at token {start} of {:?}", self.path)
    }

    /// The inputs and targets of windows.
    fn windows(&self, samples: &[Sample]) -> Result<(Tensor, Tensor), Cause> {
        let width = self.header.width;
        let of_window = (self.block + 1) * width;
        let mut bytes = vec![0; samples.len() * of_window];
        for (sample, window) in samples.iter().zip(bytes.chunks_exact_mut(of_window)) {
            self.file.read_exact_at(window, (TokenHeader::LEN + self.start(sample) * width) as u64)?;
        }
        self.check(&bytes)?;
        let kind = if width == 2 { Kind::Int16 } else { Kind::Int };
        let tokens = Tensor::f_from_data_size(&bytes, &[samples.len() as i64, self.block as i64 + 1], kind)?;
        // libtorch does not compute with u16: the bytes are read as i16, and the sign extension is masked out.
        let bits = (1i64 << (8 * width)) - 1;
        let part = |first| {
            let part = tokens.f_narrow(1, first, self.block as i64)?;
            part.f_to_kind(Kind::Int64)?.f_bitwise_and_(bits)
        };
        Ok((part(0)?, part(1)?))
    }

    /// Returns an error for tokens that the vocabulary does not have.
    fn check(&self, bytes: &[u8]) -> Result<(), Cause> {
        // The compiler vectorises this fold, but not `max`.
        let greatest = match self.header.width {
            2 => bytes.as_chunks().0.iter().fold(0, |most, two| u16::from_le_bytes(*two).max(most)).into(),
            _ => bytes.as_chunks().0.iter().fold(0, |most, four| u32::from_le_bytes(*four).max(most)),
        };
        let vocabulary = self.header.vocabulary;
        if greatest < vocabulary {
            return Ok(());
        }
        Err(format!(
            "token {greatest} is not in the vocabulary of {vocabulary} tokens: the file is damaged; try drumline data tokens again"
        )
        .into())
    }
}

impl Dataset for TokenData {
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        (self.header.count as usize - 1) / self.block
    }

    fn batch(&self, samples: &[Sample]) -> Result<(Tensor, Tensor), SampleError> {
        self.windows(samples).map_err(|cause| {
            let (index, start) = samples.first().map_or((0, 0), |sample| (sample.index, self.start(sample)));
            SampleError::new(index, self.window_at(start), cause)
        })
    }

    fn fingerprint(&self) -> Option<u32> {
        Some(crc32fast::hash(self.fingerprint().ok()?.as_bytes()))
    }

    /// The position in an epoch without an offset.
    fn name(&self, index: usize) -> String {
        self.window_at(index * self.block)
    }

    fn pin_memory(&self, batch: (Tensor, Tensor)) -> Result<(Tensor, Tensor), TorchError> {
        let pin = |tensor: &Tensor| tensor.f_pin_memory(Device::Cuda(0));
        Ok((pin(&batch.0)?, pin(&batch.1)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_text::write_tokens;

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let (from, out) = (folder.path().join("a.txt"), folder.path().join("a.tokens"));
        std::fs::write(&from, text).unwrap();
        write_tokens(&[from], &GptTokenizer::bytes(), &out, |_| Ok(())).unwrap();
        (folder, out)
    }

    fn batch(data: &TokenData, indices: &[usize]) -> (Tensor, Tensor) {
        data.batch(&indices.iter().map(|index| Sample::new(0, 0, *index)).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn each_token_is_a_target_once() {
        let (_folder, path) = file("abcdefghij");
        let data = TokenData::open(&path, &GptTokenizer::bytes(), 3).unwrap();
        assert_eq!(data.len(), 3, "ten targets, of which one fills no window");
        let (input, target) = batch(&data, &[2, 0]);
        assert_eq!(input, Tensor::from_slice2(&[[103i64, 104, 105], [97, 98, 99]]));
        assert_eq!(target, Tensor::from_slice2(&[[104i64, 105, 106], [98, 99, 100]]));
        let whole = TokenData::open(&path, &GptTokenizer::bytes(), 10).unwrap();
        assert_eq!(batch(&whole, &[0]).1.int64_value(&[0, 9]), 256, "up to the very end");
    }

    #[test]
    fn windows_are_shifted_in_each_epoch() {
        let (_folder, path) = file("abcdefghijklmnopqrstuvwxyz");
        let fixed = TokenData::open(&path, &GptTokenizer::bytes(), 5).unwrap();
        let moved = TokenData::open(&path, &GptTokenizer::bytes(), 5).unwrap().beginning(Begin::Moved);
        assert_eq!((fixed.len(), moved.len()), (5, 5), "an epoch has as many steps");
        let of_epoch = |data: &TokenData, seed, epoch| {
            let samples: Vec<_> = (0..5).map(|index| Sample::new(seed, epoch, index)).collect();
            let (input, target) = data.batch(&samples).unwrap();
            assert_eq!(input.narrow(1, 1, 4), target.narrow(1, 0, 4), "the targets follow");
            Vec::<i64>::try_from(input.select(1, 0)).unwrap()
        };
        let starts: Vec<_> = (0..40).map(|epoch| of_epoch(&moved, 3, epoch)).collect();
        let firsts: std::collections::HashSet<_> = starts.iter().map(|starts| starts[0] - 97).collect();
        assert_eq!(firsts, (0..5).collect(), "each place of a window in some epoch");
        for starts in &starts {
            let moved = starts[0];
            let expected = [moved, moved + 5, moved + 10, moved + 15, (moved + 20).min(118)];
            assert_eq!(starts.as_slice(), expected, "all by as many, and none beyond the end");
        }
        assert_eq!(of_epoch(&moved, 3, 7), starts[7], "a resumed run sees the same windows");
        assert_ne!(
            (0..40).map(|epoch| of_epoch(&moved, 4, epoch)).collect::<Vec<_>>(),
            starts,
            "another seed"
        );
        assert_eq!(of_epoch(&fixed, 3, 1), [97, 102, 107, 112, 117], "control");
    }

    #[test]
    fn a_file_of_one_window_is_shifted_within_the_file() {
        let (_folder, path) = file("abcdefg");
        let data = TokenData::open(&path, &GptTokenizer::bytes(), 6).unwrap().beginning(Begin::Moved);
        let of = |epoch| data.batch(&[Sample::new(0, epoch, 0)]).unwrap().0.int64_value(&[0, 0]);
        assert_eq!((0..30).map(of).collect::<std::collections::HashSet<_>>(), [97, 98].into());
    }

    #[test]
    fn files_that_do_not_fit_are_refused() {
        let (folder, path) = file("abcdefghij");
        let said = |tokenizer: &GptTokenizer, block| {
            TokenData::open(&path, tokenizer, block).unwrap_err().to_string()
        };
        let few = said(&GptTokenizer::bytes(), 11);
        assert!(few.contains("has 11 tokens, expected at least 12") && few.contains("MODEL.BLOCK"), "{few}");
        let other = GptTokenizer::learn(["abc abc".to_owned()], 258, folder.path()).unwrap();
        assert!(said(&other, 3).contains("of another vocabulary, of 257 tokens, expected the 258"));
        let mut bytes = std::fs::read(&path).unwrap();
        let at = TokenHeader::LEN + 2 * 4 + 1;
        bytes[at] = 0xff;
        std::fs::write(&path, &bytes).unwrap();
        let data = TokenData::open(&path, &GptTokenizer::bytes(), 3).unwrap();
        let error = data.batch(&[Sample::new(0, 0, 1)]).unwrap_err().to_string();
        assert!(
            error.contains("the window at token 3") && error.contains("token 65381 is not in"),
            "{error}"
        );
        bytes.pop();
        std::fs::write(&path, &bytes).unwrap();
        assert!(said(&GptTokenizer::bytes(), 3).contains("is incomplete"));
    }

    /// A token file of bytes with another width or count. Missing tokens are zeros in a sparse file, which take no disk
    /// space.
    fn sparse(width: u32, count: u64, tokens: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let (folder, path) = file("a");
        let mut header = std::fs::read(&path).unwrap()[..TokenHeader::LEN].to_vec();
        header[12..16].copy_from_slice(&width.to_le_bytes());
        header[24..32].copy_from_slice(&count.to_le_bytes());
        let checksum = crc32fast::hash(&header[..36]);
        header[36..].copy_from_slice(&checksum.to_le_bytes());
        let len = TokenHeader::LEN as u64 + count * u64::from(width);
        let file = File::create(&path).unwrap();
        file.set_len(len).unwrap();
        file.write_all_at(&header, 0).unwrap();
        file.write_all_at(tokens, len - tokens.len() as u64).unwrap();
        (folder, path)
    }

    #[test]
    fn a_file_may_be_larger_than_memory() {
        let memory = std::fs::read_to_string("/proc/meminfo").unwrap();
        let total = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
        let total: u64 = total.trim().trim_end_matches(" kB").parse().unwrap();
        // A window has 4 tokens and the target of the last one.
        let count = total * 1024 * 3 / 2 / 2 / 4 * 4 + 1;
        let (_folder, path) = sparse(2, count, &[104, 0, 105, 0]);
        let data = TokenData::open(&path, &GptTokenizer::bytes(), 4).unwrap();
        let last = data.len() - 1;
        let (_, target) = batch(&data, &[0, last]);
        assert_eq!(target, Tensor::from_slice2(&[[0i64; 4], [0, 0, 104, 105]]));
        assert!(data.fingerprint().unwrap().starts_with(&format!("{count} of 257 tokens")));
    }

    #[test]
    fn tokens_of_four_bytes_are_read_and_great_ones_are_refused() {
        let tokens = [3u32, 256, 0, 255, 7].map(u32::to_le_bytes).concat();
        let (_folder, path) = sparse(4, 5, &tokens);
        let data = TokenData::open(&path, &GptTokenizer::bytes(), 4).unwrap();
        let (input, target) = batch(&data, &[0]);
        assert_eq!(input, Tensor::from_slice2(&[[3i64, 256, 0, 255]]));
        assert_eq!(target, Tensor::from_slice2(&[[256i64, 0, 255, 7]]));
        // As a signed number, it would be negative.
        for great in [257u32, 1 << 31, u32::MAX] {
            let (_folder, path) = sparse(4, 5, &great.to_le_bytes());
            let data = TokenData::open(&path, &GptTokenizer::bytes(), 4).unwrap();
            let said = data.batch(&[Sample::new(0, 0, 0)]).unwrap_err().to_string();
            assert!(
                said.contains(&format!("token {great} is not in the vocabulary of 257 tokens")),
                "{said}"
            );
        }
    }

    #[test]
    fn a_file_that_is_cut_while_it_is_read_is_an_error() {
        let (_folder, path) = file("abcdefghij");
        let data = TokenData::open(&path, &GptTokenizer::bytes(), 3).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(TokenHeader::LEN as u64 + 8).unwrap();
        assert_eq!(batch(&data, &[0]).0.int64_value(&[0, 0]), 97);
        let said = data.batch(&[Sample::new(0, 0, 1)]).unwrap_err().to_string();
        assert!(said.contains("the window at token 3"), "{said}");
    }

    #[test]
    fn fingerprints_distinguish_files() {
        let print = |text: &str| {
            let (_folder, path) = file(text);
            TokenData::open(&path, &GptTokenizer::bytes(), 2).unwrap().fingerprint().unwrap()
        };
        assert_eq!(print("abcdefghij"), print("abcdefghij"));
        assert_ne!(print("abcdefghij"), print("abcdefghXj"));
        assert_ne!(print("abcdefghij"), print("abcdefghijk"));
    }
}
