//! Pure: parser of Go's template syntax, as far as a line of values needs it.

use super::{
    LONGEST, LogTemplateError, MOST_FUNCTIONS, MOST_VALUES, RequestField, ResponseField,
    RevisionField, TemplateFunction, TemplatePart, TemplateValue, ValueSource,
};

/// Deepest nesting of parentheses.
const DEEPEST: usize = 8;

/// Methods of Go's `Request` that read a header, with the header's name.
const METHODS: [(&str, &str); 2] =
    [(".Request.UserAgent", "User-Agent"), (".Request.Referer", "Referer")];

/// Fields that are values by themselves, with their source.
const FIELDS: [(&str, ValueSource); 22] = [
    (".Request.Method", ValueSource::Request(RequestField::Method)),
    (".Request.RequestURI", ValueSource::Request(RequestField::Target)),
    (".Request.URL", ValueSource::Request(RequestField::Target)),
    (".Request.URL.String", ValueSource::Request(RequestField::Target)),
    (".Request.URL.Path", ValueSource::Request(RequestField::Path)),
    (".Request.URL.RawQuery", ValueSource::Request(RequestField::Query)),
    (".Request.Host", ValueSource::Request(RequestField::Host)),
    (".Request.Proto", ValueSource::Request(RequestField::Proto)),
    (".Request.ProtoMajor", ValueSource::Request(RequestField::Major)),
    (".Request.ProtoMinor", ValueSource::Request(RequestField::Minor)),
    (".Request.RemoteAddr", ValueSource::Request(RequestField::Remote)),
    (".Request.ContentLength", ValueSource::Request(RequestField::Length)),
    (".TraceID", ValueSource::Request(RequestField::Trace)),
    (".Response.Code", ValueSource::Response(ResponseField::Code)),
    (".Response.Size", ValueSource::Response(ResponseField::Size)),
    (".Response.Latency", ValueSource::Response(ResponseField::Latency)),
    (".Revision.Name", ValueSource::Revision(RevisionField::Name)),
    (".Revision.Namespace", ValueSource::Revision(RevisionField::Namespace)),
    (".Revision.Service", ValueSource::Revision(RevisionField::Service)),
    (".Revision.Configuration", ValueSource::Revision(RevisionField::Configuration)),
    (".Revision.PodName", ValueSource::Revision(RevisionField::PodName)),
    (".Revision.PodIP", ValueSource::Revision(RevisionField::PodIp)),
];

/// Position in the text and description of an error.
type TemplateSyntaxError = (usize, String);

pub(super) fn parse(source: &str) -> Result<Vec<TemplatePart>, LogTemplateError> {
    // The length is checked first: it bounds the work of everything that follows.
    let read = if source.len() > LONGEST {
        Err((0, format!("it is longer than {LONGEST} bytes")))
    } else {
        parts(source)
    };
    read.map_err(|(at, what)| {
        let before = source.get(..at).unwrap_or(source);
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        LogTemplateError { line: before.matches('\n').count() + 1, column, what }
    })
}

fn parts(source: &str) -> Result<Vec<TemplatePart>, TemplateSyntaxError> {
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
            parts.push(TemplatePart::Text(text.into()));
        }
        let Some(inside) = inside else { return Ok(parts) };
        let start = inside + usize::from(trims_before);
        let (value, end) = action(source, start, inside - 2)?;
        if let Some(value) = value {
            values += 1;
            if values > MOST_VALUES {
                return Err((inside - 2, format!("it has more than {MOST_VALUES} values")));
            }
            parts.push(TemplatePart::Value(value));
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
) -> Result<(Option<TemplateValue>, (usize, bool)), TemplateSyntaxError> {
    let mut words = TemplateLexer { source, at: start };
    // As in Go, a comment must fill the whole action.
    let comment = source[start..].trim_start();
    if comment.starts_with("/*") {
        let begin = source.len() - comment.len();
        let end = comment.find("*/").ok_or_else(|| (opened, "unclosed comment".to_owned()))?;
        words.at = begin + end + 2;
        return match words.take()? {
            (_, TemplateToken::Close(trims)) => Ok((None, (words.at, trims))),
            (at, _) => Err((at, "a comment must end before }}".to_owned())),
        };
    }
    let (value, (at, end)) = pipeline(&mut words, 0)?;
    match end {
        TemplateToken::Close(trims) => Ok((Some(value), (words.at, trims))),
        TemplateToken::End => Err((opened, "unclosed action".to_owned())),
        other => Err((at, format!("unexpected {} in it", other.name()))),
    }
}

/// Parses a value with its functions. Returns it with the token that ends it.
fn pipeline(
    words: &mut TemplateLexer<'_>,
    depth: usize,
) -> Result<(TemplateValue, (usize, TemplateToken)), TemplateSyntaxError> {
    let mut value = command(words, depth)?;
    loop {
        match words.take()? {
            (_, TemplateToken::Pipe) => {}
            end => return Ok((value, end)),
        }
        match words.take()? {
            (at, TemplateToken::Name(name)) => value.goes_through(function(at, &name)?, at)?,
            (at, other) => return Err((at, format!("{} where a function must be", other.name()))),
        }
    }
}

fn command(
    words: &mut TemplateLexer<'_>,
    depth: usize,
) -> Result<TemplateValue, TemplateSyntaxError> {
    let (at, word) = words.take()?;
    let TemplateToken::Name(name) = word else { return operand(words, (at, word), depth) };
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
fn index(words: &mut TemplateLexer<'_>) -> Result<TemplateValue, TemplateSyntaxError> {
    match words.take()? {
        (_, TemplateToken::Field(path)) if path == ".Request.Header" => {}
        (at, other) => {
            return Err((at, format!("index is for .Request.Header, not for {}", other.name())));
        }
    }
    let name = text(words)?;
    // Without an index the token belongs to the caller, so reading goes back to its begin.
    let before = words.at;
    match words.take()? {
        (_, TemplateToken::Number(number)) if number == "0" => {
            Ok(TemplateValue::of(RequestField::Header(name)))
        }
        (at, TemplateToken::Number(_)) => {
            Err((at, "of a header only value 0 can be asked for".to_owned()))
        }
        _ => {
            words.at = before;
            Ok(TemplateValue::of(RequestField::Headers(name)))
        }
    }
}

fn operand(
    words: &mut TemplateLexer<'_>,
    (at, word): (usize, TemplateToken),
    depth: usize,
) -> Result<TemplateValue, TemplateSyntaxError> {
    match word {
        TemplateToken::Field(path) if path == ".Request.Header.Get" => {
            Ok(TemplateValue::of(RequestField::Header(text(words)?)))
        }
        TemplateToken::Field(path) => field(at, &path),
        TemplateToken::Text(text) => {
            Ok(TemplateValue { from: ValueSource::Literal(text.into()), through: Vec::new() })
        }
        TemplateToken::Number(digits) => {
            Ok(TemplateValue { from: ValueSource::Literal(digits.into()), through: Vec::new() })
        }
        // Parentheses recurse: the bound limits the use of the stack.
        TemplateToken::Open if depth == DEEPEST => Err((at, "too many parentheses".to_owned())),
        TemplateToken::Open => {
            let (value, (end, word)) = pipeline(words, depth + 1)?;
            match word {
                TemplateToken::Shut => Ok(value),
                other => Err((end, format!("{} where ) must be", other.name()))),
            }
        }
        TemplateToken::Name(name) => Err((at, format!("{name:?} where a value must be"))),
        TemplateToken::Close(_) | TemplateToken::End => {
            Err((at, "missing value for command".to_owned()))
        }
        TemplateToken::Pipe | TemplateToken::Shut => {
            Err((at, format!("{} where a value must be", word.name())))
        }
    }
}

fn field(at: usize, path: &str) -> Result<TemplateValue, TemplateSyntaxError> {
    if let Some((_, header)) = METHODS.iter().find(|(name, _)| *name == path) {
        return Ok(TemplateValue::of(RequestField::Header((*header).into())));
    }
    let known = FIELDS.iter().find(|(name, _)| *name == path);
    let (_, from) = known.ok_or_else(|| (at, format!("there is no {path}")))?;
    Ok(TemplateValue { from: from.clone(), through: Vec::new() })
}

fn function(at: usize, name: &str) -> Result<TemplateFunction, TemplateSyntaxError> {
    match name {
        "js" => Ok(TemplateFunction::Js),
        "html" => Ok(TemplateFunction::Html),
        "urlquery" => Ok(TemplateFunction::UrlQuery),
        "print" => Ok(TemplateFunction::Print),
        other => Err((at, format!("{other:?} is not supported"))),
    }
}

/// Parses the name of a header, in quotes.
fn text(words: &mut TemplateLexer<'_>) -> Result<Box<str>, TemplateSyntaxError> {
    match words.take()? {
        (_, TemplateToken::Text(text)) => Ok(text.into()),
        (at, other) => Err((at, format!("{} where a name in quotes must be", other.name()))),
    }
}

impl TemplateValue {
    fn of(it: RequestField) -> Self {
        Self { from: ValueSource::Request(it), through: Vec::new() }
    }

    fn goes_through(
        &mut self,
        function: TemplateFunction,
        at: usize,
    ) -> Result<(), TemplateSyntaxError> {
        if self.through.len() == MOST_FUNCTIONS {
            return Err((at, format!("a value goes through at most {MOST_FUNCTIONS} functions")));
        }
        self.through.push(function);
        Ok(())
    }
}

/// Token of an action.
#[derive(Debug)]
enum TemplateToken {
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

impl TemplateToken {
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
struct TemplateLexer<'a> {
    source: &'a str,
    at: usize,
}

impl TemplateLexer<'_> {
    /// Returns the next token and its position.
    fn take(&mut self) -> Result<(usize, TemplateToken), TemplateSyntaxError> {
        let rest = self.source.get(self.at..).unwrap_or_default();
        let word = rest.trim_start();
        let begin = self.source.len() - word.len();
        if word.starts_with("}}") {
            return Ok(self.word(begin, 2, TemplateToken::Close(false)));
        }
        // The space before a trimming `-}}` is part of it; without one, `-` would belong to the value.
        if word.starts_with("-}}") && word.len() < rest.len() {
            return Ok(self.word(begin, 3, TemplateToken::Close(true)));
        }
        let name_length = |text: &str| {
            text.find(|it: char| it != '_' && !it.is_alphanumeric()).unwrap_or(text.len())
        };
        match word.chars().next() {
            None => Ok(self.word(begin, 0, TemplateToken::End)),
            Some('|') => Ok(self.word(begin, 1, TemplateToken::Pipe)),
            Some('(') => Ok(self.word(begin, 1, TemplateToken::Open)),
            Some(')') => Ok(self.word(begin, 1, TemplateToken::Shut)),
            Some('"') => self.quoted(begin, word),
            Some('`') => {
                let end = word[1..].find('`').ok_or_else(|| unclosed(begin))?;
                Ok(self.word(begin, end + 2, TemplateToken::Text(word[1..=end].to_owned())))
            }
            Some('.') => {
                let is_path = |it: char| it == '.' || it == '_' || it.is_alphanumeric();
                let end = word.find(|it| !is_path(it)).unwrap_or(word.len());
                Ok(self.word(begin, end, TemplateToken::Field(word[..end].to_owned())))
            }
            Some(it) if it.is_ascii_digit() => {
                let end = name_length(word);
                let digits = word[..end].to_owned();
                if digits.bytes().all(|it| it.is_ascii_digit()) {
                    return Ok(self.word(begin, end, TemplateToken::Number(digits)));
                }
                Err((begin, format!("bad number {digits:?}")))
            }
            Some(it) if it == '_' || it.is_alphabetic() => {
                let end = name_length(word);
                Ok(self.word(begin, end, TemplateToken::Name(word[..end].to_owned())))
            }
            Some(it) => Err((begin, format!("{it:?} is not supported"))),
        }
    }

    fn word(&mut self, begin: usize, length: usize, word: TemplateToken) -> (usize, TemplateToken) {
        self.at = begin + length;
        (begin, word)
    }

    /// Reads a text between double quotes, with Go's common escapes.
    fn quoted(
        &mut self,
        begin: usize,
        word: &str,
    ) -> Result<(usize, TemplateToken), TemplateSyntaxError> {
        let (mut text, mut letters) = (String::new(), word.char_indices().skip(1));
        while let Some((at, letter)) = letters.next() {
            match letter {
                '"' => return Ok(self.word(begin, at + 1, TemplateToken::Text(text))),
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

fn unclosed(at: usize) -> TemplateSyntaxError {
    (at, "unterminated text".to_owned())
}
