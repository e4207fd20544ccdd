//! Text as people write it, from words with spaces between them.

/// Put punctuation where people put it, and begin the sentence with a capital letter: what scripts of the Moses toolkit do to English, in few rules, for
/// NJUNMT's `postprocess`. Languages without spaces are left as they are but for the punctuation.
///
/// ```
/// use drumline_text::detokenized;
///
/// assert_eq!(detokenized("he said , \" it 's ( not ) so . \""), "He said, \"it's (not) so.\"");
/// assert_eq!(detokenized("we do n't know : 5 % ?"), "We don't know: 5%?");
/// ```
pub fn detokenized(words: &str) -> String {
    let mut text = String::with_capacity(words.len());
    let (mut is_quoted, mut is_joined) = (false, true);
    for word in words.split_whitespace() {
        let is_quote = word == "\"";
        let closes = is_quote && is_quoted;
        let begins_alone = !(is_joined || closes || hangs_on(word));
        if begins_alone {
            text.push(' ');
        }
        text.push_str(word);
        is_quoted ^= is_quote;
        is_joined = opens(word) || (is_quote && !closes);
    }
    capitalised(&text)
}

/// Words that follow without a space.
fn hangs_on(word: &str) -> bool {
    let is_end = !word.is_empty() && word.chars().all(|letter| ",.?!:;%)]}…".contains(letter));
    let is_short_form =
        ["n't", "'s", "'re", "'ve", "'ll", "'d", "'m", "'"].contains(&word.to_lowercase().as_str());
    is_end || is_short_form
}

/// Words that are followed without one.
fn opens(word: &str) -> bool {
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
    fn nothing_is_lost_but_spaces() {
        for words in ["", "a", "\" a \" b", "( ( a ) , b . . . )", "日 本 語 。", "\" \" \"", "$ 5 and £ 6"]
        {
            let bare = |text: &str| text.to_lowercase().split_whitespace().collect::<String>();
            assert_eq!(bare(&detokenized(words)), bare(words));
        }
        assert_eq!(detokenized("( $ 5 )"), "($5)");
        assert_eq!(detokenized("\" a \" b"), "\"A\" b");
    }
}
