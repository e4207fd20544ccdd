//! Detokenization: from words separated by spaces to text as people write it.

/// Removes the spaces around punctuation, and begins the sentence with a capital letter. It does what the Moses toolkit's scripts
/// do for English, with few rules, for NJUNMT's `postprocess`. In languages without spaces it only changes the punctuation.
///
/// ```
/// use drumline_text::detokenized;
///
/// assert_eq!(detokenized("he said , \" it 's ( not ) so . \""), "He said, \"it's (not) so.\"");
/// assert_eq!(detokenized("we do n't know : 5 % ?"), "We don't know: 5%?");
/// ```
pub fn detokenized(words: &str) -> String {
    let mut text = String::with_capacity(words.len());
    let mut is_quoted = false;
    let mut is_joined = true;
    for word in words.split_whitespace() {
        let is_quote = word == "\"";
        let closes = is_quote && is_quoted;
        let needs_space = !(is_joined || closes || joins_previous(word));
        if needs_space {
            text.push(' ');
        }
        text.push_str(word);
        is_quoted ^= is_quote;
        is_joined = joins_next(word) || (is_quote && !closes);
    }
    capitalised(&text)
}

/// Whether there is no space before the word.
fn joins_previous(word: &str) -> bool {
    let is_end = !word.is_empty() && word.chars().all(|letter| ",.?!:;%)]}…".contains(letter));
    let is_short_form =
        ["n't", "'s", "'re", "'ve", "'ll", "'d", "'m", "'"].contains(&word.to_lowercase().as_str());
    is_end || is_short_form
}

/// Whether there is no space after the word.
fn joins_next(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|letter| "([{¿¡$£€".contains(letter))
}

fn capitalised(text: &str) -> String {
    let Some(place) = text.find(char::is_alphanumeric) else { return text.to_owned() };
    let (before, after) = text.split_at(place);
    let mut letters = after.chars();
    let first = letters.next().into_iter().flat_map(char::to_uppercase);
    before.chars().chain(first).chain(letters).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_spaces_are_removed() {
        for words in ["", "a", "\" a \" b", "( ( a ) , b . . . )", "日 本 語 。", "\" \" \"", "$ 5 and £ 6"]
        {
            let bare = |text: &str| text.to_lowercase().split_whitespace().collect::<String>();
            assert_eq!(bare(&detokenized(words)), bare(words));
        }
        assert_eq!(detokenized("( $ 5 )"), "($5)");
        assert_eq!(detokenized("\" a \" b"), "\"A\" b");
    }
}
