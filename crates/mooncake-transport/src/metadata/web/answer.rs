//! Reads one HTTP/1.1 answer, however hostile, in bounded memory.

use std::io::{self, Read};

use crate::metadata::error::AnswerError;

/// Longest status line, header or chunk head, in bytes.
const LINE_BYTES_MAX: usize = 8 << 10;

/// Most lines of a head, and of what follows the last chunk.
const LINES_MAX: usize = 128;

/// Most answers of the kind "more will follow" before the answer.
const INTERIM_MAX: usize = 8;

/// Most bytes read at once, and of overhead between chunks.
const BLOCK: usize = 16 << 10;

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum AnswerFailure {
    /// The connection failed, or ended before the answer did (`UnexpectedEof`).
    Io(io::Error),
    Malformed(AnswerError),
    TooLong,
}

impl From<AnswerError> for AnswerFailure {
    fn from(error: AnswerError) -> Self {
        Self::Malformed(error)
    }
}

/// An answer.
#[derive(Debug, PartialEq)]
pub(in crate::metadata) struct Answer {
    pub(in crate::metadata) status: u16,
    /// Empty unless the status is 200.
    pub(in crate::metadata) body: Vec<u8>,
}

/// Where a body ends.
#[derive(Clone, Copy, PartialEq)]
enum Framing {
    Length(u64),
    Chunks,
    Unknown,
}

/// Reads an answer, with a body of at most `len_max` bytes.
///
/// # Complexity
/// Holds no more than the body as far as it has come, a line and a block.
pub(super) fn read_answer(from: &mut impl Read, len_max: u64) -> Result<Answer, AnswerFailure> {
    let mut input = Input {
        from,
        block: vec![0; BLOCK],
        at: 0,
        end: 0,
    };
    for _ in 0..=INTERIM_MAX {
        let (status, framing) = input.head()?;
        match status {
            100..=199 => {}
            200 => {
                let body = match framing {
                    Framing::Length(len) if len > len_max => return Err(AnswerFailure::TooLong),
                    Framing::Length(len) => {
                        let mut body = Vec::new();
                        input.take(len, &mut body)?;
                        body
                    }
                    Framing::Chunks => input.chunks(len_max)?,
                    Framing::Unknown => return Err(AnswerError::NoLength.into()),
                };
                return Ok(Answer { status, body });
            }
            _ => {
                let body = Vec::new();
                return Ok(Answer { status, body });
            }
        }
    }
    Err(AnswerError::HeadTooLong.into())
}

struct Input<'a, R> {
    from: &'a mut R,
    block: Vec<u8>,
    at: usize,
    end: usize,
}

impl<R: Read> Input<'_, R> {
    /// Makes at least one byte available.
    fn fill(&mut self) -> Result<(), AnswerFailure> {
        while self.at == self.end {
            match self.from.read(&mut self.block) {
                Ok(0) => return Err(AnswerFailure::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => (self.at, self.end) = (0, count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(AnswerFailure::Io(error)),
            }
        }
        Ok(())
    }

    /// Reads a line, without its end.
    fn line(&mut self) -> Result<Vec<u8>, AnswerFailure> {
        let mut line = Vec::new();
        loop {
            self.fill()?;
            let byte = self.block[self.at];
            self.at += 1;
            if byte == b'\n' {
                if line.last() == Some(&b'\r') {
                    line.pop();
                }
                return Ok(line);
            }
            if line.len() == LINE_BYTES_MAX {
                return Err(AnswerError::HeadTooLong.into());
            }
            line.push(byte);
        }
    }

    fn take(&mut self, mut len: u64, body: &mut Vec<u8>) -> Result<(), AnswerFailure> {
        while len > 0 {
            self.fill()?;
            let there = self.end - self.at;
            let count = usize::try_from(len).map_or(there, |len| len.min(there));
            body.extend_from_slice(&self.block[self.at..self.at + count]);
            self.at += count;
            len -= count as u64;
        }
        Ok(())
    }

    /// Reads status line and headers.
    fn head(&mut self) -> Result<(u16, Framing), AnswerFailure> {
        // What speaks no HTTP may never end its first line.
        for expected in *b"HTTP/1." {
            self.fill()?;
            if self.block[self.at] != expected {
                return Err(AnswerError::NotHttp.into());
            }
            self.at += 1;
        }
        let line = self.line()?;
        let status = match *line.as_slice() {
            [b'0' | b'1', b' ', a @ b'1'..=b'5', b, c, ref rest @ ..]
                if b.is_ascii_digit() && c.is_ascii_digit() && matches!(rest, [] | [b' ', ..]) =>
            {
                [a, b, c]
                    .iter()
                    .fold(0, |sum, digit| sum * 10 + u16::from(digit - b'0'))
            }
            _ => return Err(AnswerError::NotHttp.into()),
        };
        let mut framing = Framing::Unknown;
        for _ in 0..LINES_MAX {
            let line = self.line()?;
            if line.is_empty() {
                return Ok((status, framing));
            }
            let colon = line.iter().position(|byte| *byte == b':');
            let (name, value) = line.split_at(colon.ok_or(AnswerError::Header)?);
            let value = value[1..].trim_ascii();
            let found = if name.eq_ignore_ascii_case(b"content-length") {
                Framing::Length(number(value, 10).ok_or(AnswerError::Header)?)
            } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
                if !value.eq_ignore_ascii_case(b"chunked") {
                    return Err(AnswerError::Encoding.into());
                }
                Framing::Chunks
            } else if name.eq_ignore_ascii_case(b"content-encoding")
                && !value.eq_ignore_ascii_case(b"identity")
            {
                return Err(AnswerError::Encoding.into());
            } else {
                continue;
            };
            if framing != Framing::Unknown && framing != found {
                return Err(AnswerError::Header.into());
            }
            framing = found;
        }
        Err(AnswerError::HeadTooLong.into())
    }

    fn chunks(&mut self, len_max: u64) -> Result<Vec<u8>, AnswerFailure> {
        let mut body = Vec::new();
        // Chunk heads may be much longer than the chunks.
        let mut overhead = 0u64;
        loop {
            let line = self.line()?;
            overhead += line.len() as u64;
            if overhead > len_max.saturating_mul(8).saturating_add(BLOCK as u64) {
                return Err(AnswerError::Chunk.into());
            }
            let digits = line.split(|byte| *byte == b';').next().unwrap_or_default();
            let len = number(digits.trim_ascii(), 16).ok_or(AnswerError::Chunk)?;
            if len == 0 {
                break;
            }
            // Left out with `--cfg slab_twin`, for the fuzz target to notice.
            if len > len_max.saturating_sub(body.len() as u64) && !cfg!(slab_twin) {
                return Err(AnswerFailure::TooLong);
            }
            self.take(len, &mut body)?;
            if !self.line()?.is_empty() {
                return Err(AnswerError::Chunk.into());
            }
        }
        for _ in 0..LINES_MAX {
            if self.line()?.is_empty() {
                return Ok(body);
            }
        }
        Err(AnswerError::HeadTooLong.into())
    }
}

/// Reads digits and nothing else; `None` for none, others, or too many.
fn number(text: &[u8], radix: u32) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0u64, |sum, byte| {
        let digit = char::from(*byte).to_digit(radix)?;
        sum.checked_mul(u64::from(radix))?
            .checked_add(u64::from(digit))
    })
}

#[cfg(test)]
mod tests;
