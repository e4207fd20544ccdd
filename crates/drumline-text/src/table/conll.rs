//! The format of the CoNLL shared tasks: sentences of tagged words, one word per line, in columns.

use crate::TextError;
use crate::lines::for_each_line;
use std::path::Path;

/// The first column of a line that begins a document, in the files of CoNLL-2003.
const DOCUMENT: &str = "-DOCSTART-";

/// A sentence in which each word has a tag.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TaggedSentence {
    /// The words, in the order of the text.
    pub words: Vec<String>,
    /// The tag of each word.
    pub tags: Vec<String>,
    /// The line of each word, from 1.
    pub lines: Vec<u64>,
}

/// The columns of words and tags. By default those of words and named entities in CoNLL-2003.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConllOptions {
    /// The column of the words, from 0.
    pub word: usize,
    /// The column of the tags.
    pub tag: usize,
    /// The start of lines that are comments, such as `#` in CoNLL-U. `None` if there are no comments.
    pub comment: Option<String>,
}

impl Default for ConllOptions {
    fn default() -> Self {
        Self { word: 0, tag: 3, comment: None }
    }
}

/// Reads tagged sentences. Columns are separated by white space; a blank line or `-DOCSTART-` ends a sentence.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("eng.train");
/// use drumline_text::table::{ConllOptions, read_conll};
///
/// std::fs::write(&path, "Ada NNP B-NP B-PER\nsings VBZ B-VP O\n\nYes UH B-INTJ O\n")?;
/// let sentences = read_conll(&path, &ConllOptions::default())?;
/// assert_eq!(sentences[0].words, ["Ada", "sings"]);
/// assert_eq!(sentences[0].tags, ["B-PER", "O"]);
/// assert_eq!(sentences.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn read_conll(path: impl AsRef<Path>, options: &ConllOptions) -> Result<Vec<TaggedSentence>, TextError> {
    let path = path.as_ref();
    let mut sentences = Vec::new();
    let mut sentence = TaggedSentence::default();
    for_each_line(path, |line, text| {
        if options.comment.as_ref().is_some_and(|comment| text.starts_with(comment)) {
            return Ok(());
        }
        let columns: Vec<_> = text.split_whitespace().collect();
        if columns.first().is_none_or(|first| *first == DOCUMENT) {
            sentences.push(std::mem::take(&mut sentence));
            return Ok(());
        }
        let (Some(word), Some(tag)) = (columns.get(options.word), columns.get(options.tag)) else {
            let expected = format!("at least {}", options.word.max(options.tag) + 1);
            return Err(TextError::Columns { path: path.to_owned(), line, found: columns.len(), expected });
        };
        sentence.words.push((*word).to_owned());
        sentence.tags.push((*tag).to_owned());
        sentence.lines.push(line);
        Ok(())
    })?;
    sentences.push(sentence);
    sentences.retain(|sentence| !sentence.words.is_empty());
    if sentences.is_empty() {
        let left_out = "it has no words".to_owned();
        return Err(TextError::NothingRemains { path: path.to_owned(), left_out });
    }
    Ok(sentences)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, options: &ConllOptions) -> Result<Vec<TaggedSentence>, TextError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.conll");
        std::fs::write(&path, text).unwrap();
        read_conll(path, options)
    }

    #[test]
    fn sentences_end_at_blank_lines_and_documents() {
        let text =
            "-DOCSTART- -X- O O\n\na x y O\nb x y B-LOC\n\n\n-DOCSTART- -X- O O\nc x y O\r\n\r\n# x y O";
        let sentences = read(text, &ConllOptions::default()).unwrap();
        let words: Vec<_> = sentences.iter().map(|sentence| sentence.words.join(" ")).collect();
        assert_eq!(words, ["a b", "c", "#"]);
        assert_eq!(sentences[0].tags, ["O", "B-LOC"]);
        assert_eq!((&sentences[0].lines[..], &sentences[1].lines[..]), (&[3, 4][..], &[8][..]));
        let options = ConllOptions { word: 1, tag: 2, comment: Some("#".to_owned()) };
        let sentences = read("# text = Hi\n1\tHi\tINTJ\n2\t!\tPUNCT\n\n", &options).unwrap();
        assert_eq!(sentences[0].words, ["Hi", "!"]);
    }

    #[test]
    fn errors_name_the_file_and_line() {
        let error = read("a b c O\na b\n", &ConllOptions::default()).unwrap_err().to_string();
        assert!(error.contains("line 2 of") && error.contains("expected at least 4"), "{error}");
        assert!(read("\n", &ConllOptions::default()).unwrap_err().to_string().contains("no words"));
    }
}
