//! Pure: parser of Go's template syntax, as far as a line of values needs it.

use super::{
    BadTemplate, Function, LONGEST, MOST_FUNCTIONS, MOST_VALUES, Of, OfRequest, OfResponse,
    OfRevision, Part, Value,
};

/// Deepest nesting of parentheses.
const DEEPEST: usize = 8;

/// Methods of Go's `Request` that read a header, with the header's name.
const METHODS: [(&str, &str); 2] =
    [(".Request.UserAgent", "User-Agent"), (".Request.Referer", "Referer")];

/// Fields that are values by themselves, with their source.
const FIELDS: [(&str, Of); 22] = [
    (".Request.Method", Of::Request(OfRequest::Method)),
    (".Request.RequestURI", Of::Request(OfRequest::Target)),
    (".Request.URL", Of::Request(OfRequest::Target)),
    (".Request.URL.String", Of::Request(OfRequest::Target)),
    (".Request.URL.Path", Of::Request(OfRequest::Path)),
    (".Request.URL.RawQuery", Of::Request(OfRequest::Query)),
    (".Request.Host", Of::Request(OfRequest::Host)),
    (".Request.Proto", Of::Request(OfRequest::Proto)),
    (".Request.ProtoMajor", Of::Request(OfRequest::Major)),
    (".Request.ProtoMinor", Of::Request(OfRequest::Minor)),
    (".Request.RemoteAddr", Of::Request(OfRequest::Remote)),
    (".Request.ContentLength", Of::Request(OfRequest::Length)),
    (".TraceID", Of::Request(OfRequest::Trace)),
    (".Response.Code", Of::Response(OfResponse::Code)),
    (".Response.Size", Of::Response(OfResponse::Size)),
    (".Response.Latency", Of::Response(OfResponse::Latency)),
    (".Revision.Name", Of::Revision(OfRevision::Name)),
    (".Revision.Namespace", Of::Revision(OfRevision::Namespace)),
    (".Revision.Service", Of::Revision(OfRevision::Service)),
    (".Revision.Configuration", Of::Revision(OfRevision::Configuration)),
    (".Revision.PodName", Of::Revision(OfRevision::PodName)),
    (".Revision.PodIP", Of::Revision(OfRevision::PodIp)),
];

/// Position in the text and description of an error.
type Wrong = (usize, String);

pub(super) fn parse(source: &str) -> Result<Vec<Part>, BadTemplate> {
    // The length is checked first: it bounds the work of everything that follows.
    let read = if source.len() > LONGEST {
        Err((0, format!("it is longer than {LONGEST} bytes")))
    } else {
        parts(source)
    };
    read.map_err(|(at, what)| {
        let before = source.get(..at).unwrap_or(source);
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        BadTemplate { line: before.matches('\n').count() + 1, column, what }
    })
}

fn parts(source: &str) -> Result<Vec<Part>, Wrong> {
    let (mut parts, mut values, mut at, mut trims) = (Vec::new(), 0, 0, false);
    loop {
        let rest = source.get(at..).unwrap_or_default();
        let open = rest.find("{{");
        let mut text = open.map_or(rest, |end| &rest[..end]);
        if trims {
            text = text.trim_start();
        }
        let inside = open.map(|open| at + open + 2);
        let after = inside.map_or("", |inside| &source[inside..]);
        // `{{- ` trims only if a space follows: `{{-3}}` is a number.
        let trims_before = after.starts_with('-') && after[1..].starts_with(char::is_whitespace);
        if trims_before {
            text = text.trim_end();
        }
        // Trimming may leave nothing, and empty texts would only cost memory.
        if !text.is_empty() {
            parts.push(Part::Text(text.into()));
        }
        let Some(inside) = inside else { return Ok(parts) };
        let start = inside + usize::from(trims_before);
        let (value, end) = action(source, start, inside - 2)?;
        if let Some(value) = value {
            values += 1;
            if values > MOST_VALUES {
                return Err((inside - 2, format!("it has more than {MOST_VALUES} values")));
            }
            parts.push(Part::Value(value));
        }
        trims = end.1;
        at = end.0;
    }
}

/// Parses from `start` to the closing braces. Returns the value, the end, and true if the braces trim.
fn action(
    source: &str,
    start: usize,
    opened: usize,
) -> Result<(Option<Value>, (usize, bool)), Wrong> {
    let mut words = Words { source, at: start };
    // As in Go, a comment must fill the whole action.
    let comment = source[start..].trim_start();
    if comment.starts_with("/*") {
        let begin = source.len() - comment.len();
        let end = comment.find("*/").ok_or_else(|| (opened, "unclosed comment".to_owned()))?;
        words.at = begin + end + 2;
        return match words.take()? {
            (_, Word::Close(trims)) => Ok((None, (words.at, trims))),
            (at, _) => Err((at, "a comment must end before }}".to_owned())),
        };
    }
    let (value, (at, end)) = pipeline(&mut words, 0)?;
    match end {
        Word::Close(trims) => Ok((Some(value), (words.at, trims))),
        Word::End => Err((opened, "unclosed action".to_owned())),
        other => Err((at, format!("unexpected {} in it", other.name()))),
    }
}

/// Parses a value with its functions. Returns it with the token that ends it.
fn pipeline(words: &mut Words<'_>, depth: usize) -> Result<(Value, (usize, Word)), Wrong> {
    let mut value = command(words, depth)?;
    loop {
        match words.take()? {
            (_, Word::Pipe) => {}
            end => return Ok((value, end)),
        }
        match words.take()? {
            (at, Word::Name(name)) => value.goes_through(function(at, &name)?, at)?,
            (at, other) => return Err((at, format!("{} where a function must be", other.name()))),
        }
    }
}

fn command(words: &mut Words<'_>, depth: usize) -> Result<Value, Wrong> {
    let (at, word) = words.take()?;
    let Word::Name(name) = word else { return operand(words, (at, word), depth) };
    if name == "index" {
        return index(words);
    }
    let function = function(at, &name)?;
    let first = words.take()?;
    let mut value = operand(words, first, depth)?;
    value.goes_through(function, at)?;
    Ok(value)
}

/// Parses `index .Request.Header "NAME"`, optionally with `0` behind it.
fn index(words: &mut Words<'_>) -> Result<Value, Wrong> {
    match words.take()? {
        (_, Word::Field(path)) if path == ".Request.Header" => {}
        (at, other) => {
            return Err((at, format!("index is for .Request.Header, not for {}", other.name())));
        }
    }
    let name = text(words)?;
    // Without an index the token belongs to the caller, so reading goes back to its begin.
    let before = words.at;
    match words.take()? {
        (_, Word::Number(number)) if number == "0" => Ok(Value::of(OfRequest::Header(name))),
        (at, Word::Number(_)) => Err((at, "of a header only value 0 can be asked for".to_owned())),
        _ => {
            words.at = before;
            Ok(Value::of(OfRequest::Headers(name)))
        }
    }
}

fn operand(words: &mut Words<'_>, (at, word): (usize, Word), depth: usize) -> Result<Value, Wrong> {
    match word {
        Word::Field(path) if path == ".Request.Header.Get" => {
            Ok(Value::of(OfRequest::Header(text(words)?)))
        }
        Word::Field(path) => field(at, &path),
        Word::Text(text) => Ok(Value { from: Of::Literal(text.into()), through: Vec::new() }),
        Word::Number(digits) => Ok(Value { from: Of::Literal(digits.into()), through: Vec::new() }),
        // Parentheses recurse: the bound limits the use of the stack.
        Word::Open if depth == DEEPEST => Err((at, "too many parentheses".to_owned())),
        Word::Open => {
            let (value, (end, word)) = pipeline(words, depth + 1)?;
            match word {
                Word::Shut => Ok(value),
                other => Err((end, format!("{} where ) must be", other.name()))),
            }
        }
        Word::Name(name) => Err((at, format!("{name:?} where a value must be"))),
        Word::Close(_) | Word::End => Err((at, "missing value for command".to_owned())),
        Word::Pipe | Word::Shut => Err((at, format!("{} where a value must be", word.name()))),
    }
}

fn field(at: usize, path: &str) -> Result<Value, Wrong> {
    if let Some((_, header)) = METHODS.iter().find(|(name, _)| *name == path) {
        return Ok(Value::of(OfRequest::Header((*header).into())));
    }
    let known = FIELDS.iter().find(|(name, _)| *name == path);
    let (_, from) = known.ok_or_else(|| (at, format!("there is no {path}")))?;
    Ok(Value { from: from.clone(), through: Vec::new() })
}

fn function(at: usize, name: &str) -> Result<Function, Wrong> {
    match name {
        "js" => Ok(Function::Js),
        "html" => Ok(Function::Html),
        "urlquery" => Ok(Function::UrlQuery),
        "print" => Ok(Function::Print),
        other => Err((at, format!("{other:?} is not supported"))),
    }
}

/// Parses the name of a header, in quotes.
fn text(words: &mut Words<'_>) -> Result<Box<str>, Wrong> {
    match words.take()? {
        (_, Word::Text(text)) => Ok(text.into()),
        (at, other) => Err((at, format!("{} where a name in quotes must be", other.name()))),
    }
}

impl Value {
    fn of(it: OfRequest) -> Self {
        Self { from: Of::Request(it), through: Vec::new() }
    }

    fn goes_through(&mut self, function: Function, at: usize) -> Result<(), Wrong> {
        if self.through.len() == MOST_FUNCTIONS {
            return Err((at, format!("a value goes through at most {MOST_FUNCTIONS} functions")));
        }
        self.through.push(function);
        Ok(())
    }
}

/// Token of an action.
#[derive(Debug)]
enum Word {
    /// Path of a field, such as `.A.B`.
    Field(String),
    /// Name of a function, or a keyword.
    Name(String),
    /// Text in quotes, without the quotes.
    Text(String),
    /// Decimal number, as its digits.
    Number(String),
    Pipe,
    Open,
    Shut,
    /// Closing braces `}}`; true if they trim the text that follows.
    Close(bool),
    /// End of the whole template.
    End,
}

impl Word {
    fn name(&self) -> String {
        match self {
            Self::Field(it) | Self::Name(it) | Self::Number(it) => format!("{it:?}"),
            Self::Text(it) => format!("the text {it:?}"),
            Self::Pipe => "\"|\"".into(),
            Self::Open => "\"(\"".into(),
            Self::Shut => "\")\"".into(),
            Self::Close(_) => "\"}}\"".into(),
            Self::End => "the end".into(),
        }
    }
}

/// Lexer of one action.
struct Words<'a> {
    source: &'a str,
    at: usize,
}

impl Words<'_> {
    /// Returns the next token and its position.
    fn take(&mut self) -> Result<(usize, Word), Wrong> {
        let rest = self.source.get(self.at..).unwrap_or_default();
        let word = rest.trim_start();
        let begin = self.source.len() - word.len();
        if word.starts_with("}}") {
            return Ok(self.word(begin, 2, Word::Close(false)));
        }
        // The space before a trimming `-}}` is part of it; without one, `-` would belong to the value.
        if word.starts_with("-}}") && word.len() < rest.len() {
            return Ok(self.word(begin, 3, Word::Close(true)));
        }
        let name_length = |text: &str| {
            text.find(|it: char| it != '_' && !it.is_alphanumeric()).unwrap_or(text.len())
        };
        match word.chars().next() {
            None => Ok(self.word(begin, 0, Word::End)),
            Some('|') => Ok(self.word(begin, 1, Word::Pipe)),
            Some('(') => Ok(self.word(begin, 1, Word::Open)),
            Some(')') => Ok(self.word(begin, 1, Word::Shut)),
            Some('"') => self.quoted(begin, word),
            Some('`') => {
                let end = word[1..].find('`').ok_or_else(|| unclosed(begin))?;
                Ok(self.word(begin, end + 2, Word::Text(word[1..=end].to_owned())))
            }
            Some('.') => {
                let is_path = |it: char| it == '.' || it == '_' || it.is_alphanumeric();
                let end = word.find(|it| !is_path(it)).unwrap_or(word.len());
                Ok(self.word(begin, end, Word::Field(word[..end].to_owned())))
            }
            Some(it) if it.is_ascii_digit() => {
                let end = name_length(word);
                let digits = word[..end].to_owned();
                if digits.bytes().all(|it| it.is_ascii_digit()) {
                    return Ok(self.word(begin, end, Word::Number(digits)));
                }
                Err((begin, format!("bad number {digits:?}")))
            }
            Some(it) if it == '_' || it.is_alphabetic() => {
                let end = name_length(word);
                Ok(self.word(begin, end, Word::Name(word[..end].to_owned())))
            }
            Some(it) => Err((begin, format!("{it:?} is not supported"))),
        }
    }

    fn word(&mut self, begin: usize, length: usize, word: Word) -> (usize, Word) {
        self.at = begin + length;
        (begin, word)
    }

    /// Reads a text between double quotes, with Go's common escapes.
    fn quoted(&mut self, begin: usize, word: &str) -> Result<(usize, Word), Wrong> {
        let (mut text, mut letters) = (String::new(), word.char_indices().skip(1));
        while let Some((at, letter)) = letters.next() {
            match letter {
                '"' => return Ok(self.word(begin, at + 1, Word::Text(text))),
                // A text in double quotes may not span lines in Go; one in backquotes may.
                '\n' => break,
                '\\' => match letters.next() {
                    Some((_, it @ ('"' | '\\'))) => text.push(it),
                    Some((_, 'n')) => text.push('\n'),
                    Some((_, 't')) => text.push('\t'),
                    Some((_, 'r')) => text.push('\r'),
                    other => {
                        let it = other.map_or(' ', |(_, it)| it);
                        return Err((begin + at, format!("\"\\{it}\" is not supported in a text")));
                    }
                },
                other => text.push(other),
            }
        }
        Err(unclosed(begin))
    }
}

fn unclosed(at: usize) -> Wrong {
    (at, "unterminated text".to_owned())
}
