//! Results of prefill and decode.
use std::fmt;
use std::ops::Range;
use std::time::Duration;

use kvasir_sys as sys;

/// What a prefill appended to the sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prefilled {
    /// Number of appended tokens.
    pub tokens: u64,
    /// The byte of the text where they end: a later call with the rest of the text continues
    /// there. 0 after [`Session::prefill_tokens`](crate::Session::prefill_tokens).
    pub bytes: u64,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StopReason {
    /// The model ended its turn.
    EndOfTurn,
    /// A string of [`GenerateOptions::stop`](crate::GenerateOptions::stop).
    String,
    /// The limit of [`GenerateOptions::max_tokens`](crate::GenerateOptions::max_tokens).
    MaxTokens,
    /// The context length is reached.
    ContextFull,
    /// A cancel token or a callback.
    Cancelled,
    /// A reason that this crate does not know, or 0 where decode never began.
    Other(u32),
}

/// An answer, which displays as its text.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Answer {
    /// The whole text.
    pub text: String,
    /// What the model wrote before it. Empty unless
    /// [`GenerateOptions::thinking`](crate::GenerateOptions::thinking) is set.
    pub thought: String,
    /// Why it ended.
    pub stop_reason: StopReason,
    /// Tokens of the question, with the marks of the turn.
    pub question_tokens: u64,
    /// Tokens of the thought, without its marks.
    pub thinking_tokens: u64,
    /// Tokens of the answer, without the end-of-turn token.
    pub answer_tokens: u64,
    /// From the call to the first token.
    pub first_token: Duration,
    /// From the call to its return.
    pub total: Duration,
    /// Tokens whose keys and values were read: the sum over steps, layers and KV heads.
    pub tokens_read: u64,
    /// The same sum for full attention.
    pub tokens_present: u64,
}

impl Answer {
    pub(crate) fn of(raw: &sys::kv_answer, text: String, thought: String) -> Answer {
        Answer {
            text,
            thought,
            stop_reason: match raw.stop_reason {
                sys::KV_STOP_END_OF_TURN => StopReason::EndOfTurn,
                sys::KV_STOP_STRING => StopReason::String,
                sys::KV_STOP_MAX_TOKENS => StopReason::MaxTokens,
                sys::KV_STOP_CONTEXT_FULL => StopReason::ContextFull,
                sys::KV_STOP_CANCELLED => StopReason::Cancelled,
                other => StopReason::Other(other),
            },
            question_tokens: raw.question_tokens,
            thinking_tokens: raw.thinking_tokens,
            answer_tokens: raw.answer_tokens,
            first_token: Duration::from_nanos(raw.first_token_ns),
            total: Duration::from_nanos(raw.total_ns),
            tokens_read: raw.tokens_read,
            tokens_present: raw.tokens_present,
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// One token of [`Session::next_token`](crate::Session::next_token).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Its id.
    pub id: i32,
    /// Whether it ends the turn.
    pub ends_turn: bool,
}

/// A passage of the document: neighbouring tokens, and the bytes that they spell.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Passage {
    /// Text of the tokens, without characters that a token at an end cuts.
    pub text: String,
    /// Range in [`Session::tokens`](crate::Session::tokens), or in
    /// [`Session::document_tokens`](crate::Session::document_tokens).
    pub tokens: Range<usize>,
    /// Range in the document: all texts of [`Session::prefill`](crate::Session::prefill), in
    /// order. Widened to whole characters. `None` where it is unknown, because the caller's own
    /// tokens do not spell a text.
    pub bytes: Option<Range<usize>>,
    /// Share of all recorded attention, 0 to 1.
    pub share: f32,
    /// Of a composed session: index in [`Session::documents`](crate::Session::documents); otherwise
    /// 0.
    pub document: usize,
}

impl Passage {
    pub(crate) fn of(raw: &sys::kv_passage, text: &[u8]) -> Passage {
        let range = |first: u64, count: u64| first as usize..(first + count) as usize;
        Passage {
            text: whole_characters(text).into_owned(),
            tokens: Passage::tokens_of(raw),
            bytes: (raw.first_byte != u64::MAX).then(|| range(raw.first_byte, raw.bytes)),
            share: raw.share,
            document: raw.document as usize,
        }
    }

    pub(crate) fn tokens_of(raw: &sys::kv_passage) -> Range<usize> {
        raw.first_token as usize..(raw.first_token + raw.tokens) as usize
    }
}

/// The text without cut characters at its ends. Bytes that are not UTF-8 elsewhere are replaced.
fn whole_characters(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    let begin = bytes.iter().take(3).take_while(|&&byte| byte & 0xC0 == 0x80).count();
    let bytes = &bytes[begin..];
    let end = match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        _ => bytes.len(),
    };
    String::from_utf8_lossy(&bytes[..end])
}

#[cfg(test)]
mod tests {
    use super::whole_characters;

    #[test]
    fn cut_characters_are_dropped() {
        let text = "é key 🔑".as_bytes();
        assert_eq!(whole_characters(text), "é key 🔑");
        assert_eq!(whole_characters(&text[1..text.len() - 1]), " key ");
        assert_eq!(whole_characters(b"a\xffb"), "a\u{fffd}b");
        assert_eq!(whole_characters(b""), "");
        assert_eq!(whole_characters(b"\x94\x91"), "");
    }
}
