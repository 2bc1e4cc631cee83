//! Pure: parser of Go's template syntax, as far as a line of values needs it.
//!
//! The crate gotmpl, which checks the templates of `config-network` in the controller, is not used here for two
//! reasons. A line of Knative's default template takes it 3.1 µs, and this code 1.0 µs (one core, release build, both
//! in the same run). And a template of gotmpl may ask for any header and may loop, so an activator would have to copy
//! all headers of each request and could not bound the time of a line.

use super::{
    LogTemplateError, MAX_FUNCTIONS, MAX_TEMPLATE_BYTES, MAX_VALUES, RequestField, ResponseField,
    RevisionField, TemplateFunction, TemplatePart, TemplateValue, ValueSource,
};

/// Spaces of Go's templates. Other white space is text, and refused inside of an action.
const SPACES: [char; 4] = [' ', '\t', '\r', '\n'];

/// Deepest nesting of parentheses.
const MAX_PARENTHESES: usize = 8;

/// Methods of Go's `Request` that read a header, with the header's name.
const METHODS: [(&str, &str); 2] =
    [(".Request.UserAgent", "User-Agent"), (".Request.Referer", "Referer")];

/// Fields that are values by themselves, with their source.
const FIELDS: [(&str, ValueSource); 22] = [
    (".Request.Method", ValueSource::Request(RequestField::Method)),
    (".Request.RequestURI", ValueSource::Request(RequestField::RequestTarget)),
    (".Request.URL", ValueSource::Request(RequestField::RequestTarget)),
    (".Request.URL.String", ValueSource::Request(RequestField::RequestTarget)),
    (".Request.URL.Path", ValueSource::Request(RequestField::Path)),
    (".Request.URL.RawQuery", ValueSource::Request(RequestField::Query)),
    (".Request.Host", ValueSource::Request(RequestField::Host)),
    (".Request.Proto", ValueSource::Request(RequestField::Protocol)),
    (".Request.ProtoMajor", ValueSource::Request(RequestField::ProtocolMajor)),
    (".Request.ProtoMinor", ValueSource::Request(RequestField::ProtocolMinor)),
    (".Request.RemoteAddr", ValueSource::Request(RequestField::RemoteAddress)),
    (".Request.ContentLength", ValueSource::Request(RequestField::ContentLength)),
    (".TraceID", ValueSource::Request(RequestField::TraceId)),
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
    let read = if source.len() > MAX_TEMPLATE_BYTES {
        Err((0, format!("it is longer than {MAX_TEMPLATE_BYTES} bytes")))
    } else {
        parse_parts(source)
    };
    read.map_err(|(at, what)| {
        let before = source.get(..at).unwrap_or(source);
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        LogTemplateError { line: before.matches('\n').count() + 1, column, what }
    })
}

/// Parses a template into texts and values. Braces that trim take the spaces beside them off the texts.
fn parse_parts(source: &str) -> Result<Vec<TemplatePart>, TemplateSyntaxError> {
    let (mut parts, mut values, mut at, mut trims_after) = (Vec::new(), 0, 0, false);
    loop {
        let rest = source.get(at..).unwrap_or_default();
        let open = rest.find("{{");
        let mut text = open.map_or(rest, |end| &rest[..end]);
        if trims_after {
            text = text.trim_start_matches(SPACES);
        }
        let inside = open.map(|open| at + open + 2);
        let after = inside.map_or("", |inside| &source[inside..]);
        // `{{- ` trims only if a space follows: `{{-3}}` is a number.
        let trims_before = after.starts_with('-') && after[1..].starts_with(SPACES);
        if trims_before {
            text = text.trim_end_matches(SPACES);
        }
        // Trimming may leave nothing, and empty texts would only cost memory.
        if !text.is_empty() {
            parts.push(TemplatePart::Text(text.into()));
        }
        let Some(inside) = inside else { return Ok(parts) };
        // The space is a part of the braces: a comment may only follow at once.
        let start = if trims_before { inside + 2 } else { inside };
        let (value, (end, trims)) = parse_action(source, start, inside - 2)?;
        (at, trims_after) = (end, trims);
        if let Some(value) = value {
            values += 1;
            if values > MAX_VALUES {
                return Err((inside - 2, format!("it has more than {MAX_VALUES} values")));
            }
            parts.push(TemplatePart::Value(value));
        }
    }
}

/// Parses from `start` to the closing braces. Returns the value, the end, and true if the braces trim. `opened` is the
/// position of the opening braces, for errors.
fn parse_action(
    source: &str,
    start: usize,
    opened: usize,
) -> Result<(Option<TemplateValue>, (usize, bool)), TemplateSyntaxError> {
    if let Some(comment) = source[start..].strip_prefix("/*") {
        return Ok((None, skip_comment(source, comment, opened)?));
    }
    let mut lexer = TemplateLexer { source, offset: start, follows_operand: false };
    // Only a comment may stand in place of a value.
    let (value, (at, end)) = parse_pipeline(&mut lexer, 0)?;
    match end {
        TemplateToken::CloseBraces(trims) => Ok((Some(value), (lexer.offset, trims))),
        TemplateToken::End => Err((opened, "unclosed action".to_owned())),
        other => Err((at, format!("unexpected {} in it", other.description()))),
    }
}

/// Returns the end of an action that is a comment, and true if its closing braces trim. As in Go, a comment fills the
/// whole action, and the only space in it is that of the closing braces. `comment` begins with the comment's text.
fn skip_comment(
    source: &str,
    comment: &str,
    opened: usize,
) -> Result<(usize, bool), TemplateSyntaxError> {
    let end = comment.find("*/").ok_or_else(|| (opened, "unclosed comment".to_owned()))?;
    let after = &comment[end + 2..];
    let begin = source.len() - after.len();
    if after.starts_with("}}") {
        return Ok((begin + 2, false));
    }
    match after.strip_prefix(SPACES) {
        Some(it) if it.starts_with("-}}") => Ok((begin + 4, true)),
        Some(_) | None => Err((begin, "a comment must end before }}".to_owned())),
    }
}

/// Parses a value with its functions. Returns it with the token that ends it.
fn parse_pipeline(
    lexer: &mut TemplateLexer<'_>,
    depth: usize,
) -> Result<(TemplateValue, (usize, TemplateToken)), TemplateSyntaxError> {
    let mut value = parse_command(lexer, depth)?;
    loop {
        match lexer.next_token()? {
            (_, TemplateToken::Pipe) => {}
            end => return Ok((value, end)),
        }
        match lexer.next_token()? {
            (at, TemplateToken::Name(name)) => {
                value.push_function(parse_function(at, &name)?, at)?
            }
            (at, other) => {
                return Err((at, format!("{} where a function must be", other.description())));
            }
        }
    }
}

fn parse_command(
    lexer: &mut TemplateLexer<'_>,
    depth: usize,
) -> Result<TemplateValue, TemplateSyntaxError> {
    let (at, token) = lexer.next_token()?;
    let TemplateToken::Name(name) = token else { return parse_operand(lexer, (at, token), depth) };
    if name == "index" {
        return parse_index(lexer);
    }
    let function = parse_function(at, &name)?;
    let first = lexer.next_token()?;
    let mut value = parse_operand(lexer, first, depth)?;
    value.push_function(function, at)?;
    Ok(value)
}

/// Parses `index .Request.Header "NAME"`, optionally with `0` behind it.
fn parse_index(lexer: &mut TemplateLexer<'_>) -> Result<TemplateValue, TemplateSyntaxError> {
    match lexer.next_token()? {
        (_, TemplateToken::Field(path)) if path == ".Request.Header" => {}
        (at, other) => {
            return Err((
                at,
                format!("index is for .Request.Header, not for {}", other.description()),
            ));
        }
    }
    let name = parse_header_name(lexer)?;
    // Without an index the token belongs to the caller, so reading goes back to its begin.
    let before = *lexer;
    match lexer.next_token()? {
        (_, TemplateToken::Number(number)) if number == "0" => {
            Ok(TemplateValue::of_request(RequestField::Header(name)))
        }
        (at, TemplateToken::Number(_)) => {
            Err((at, "of a header only value 0 can be asked for".to_owned()))
        }
        _ => {
            *lexer = before;
            Ok(TemplateValue::of_request(RequestField::Headers(name)))
        }
    }
}

/// Parses a value without functions: a field, a text, a number, or a pipeline in parentheses.
fn parse_operand(
    lexer: &mut TemplateLexer<'_>,
    (at, token): (usize, TemplateToken),
    depth: usize,
) -> Result<TemplateValue, TemplateSyntaxError> {
    match token {
        TemplateToken::Field(path) if path == ".Request.Header.Get" => {
            Ok(TemplateValue::of_request(RequestField::Header(parse_header_name(lexer)?)))
        }
        TemplateToken::Field(path) => parse_field(at, &path),
        TemplateToken::Text(text) => {
            Ok(TemplateValue { source: ValueSource::Literal(text.into()), functions: Vec::new() })
        }
        TemplateToken::Number(digits) => {
            Ok(TemplateValue { source: ValueSource::Literal(digits.into()), functions: Vec::new() })
        }
        // Parentheses recurse: the bound limits the use of the stack.
        TemplateToken::OpenParenthesis if depth == MAX_PARENTHESES => {
            Err((at, "too many parentheses".to_owned()))
        }
        TemplateToken::OpenParenthesis => {
            let (value, (end, token)) = parse_pipeline(lexer, depth + 1)?;
            match token {
                TemplateToken::CloseParenthesis => Ok(value),
                other => Err((end, format!("{} where ) must be", other.description()))),
            }
        }
        TemplateToken::Name(name) => Err((at, format!("{name:?} where a value must be"))),
        TemplateToken::CloseBraces(_) | TemplateToken::End => {
            Err((at, "missing value for command".to_owned()))
        }
        TemplateToken::Pipe | TemplateToken::CloseParenthesis => {
            Err((at, format!("{} where a value must be", token.description())))
        }
    }
}

fn parse_field(at: usize, path: &str) -> Result<TemplateValue, TemplateSyntaxError> {
    if let Some((_, header)) = METHODS.iter().find(|(name, _)| *name == path) {
        return Ok(TemplateValue::of_request(RequestField::Header((*header).into())));
    }
    let field = FIELDS.iter().find(|(name, _)| *name == path);
    let (_, from) = field.ok_or_else(|| (at, format!("there is no {path}")))?;
    Ok(TemplateValue { source: from.clone(), functions: Vec::new() })
}

fn parse_function(at: usize, name: &str) -> Result<TemplateFunction, TemplateSyntaxError> {
    match name {
        "js" => Ok(TemplateFunction::Js),
        "html" => Ok(TemplateFunction::Html),
        "urlquery" => Ok(TemplateFunction::UrlQuery),
        "print" => Ok(TemplateFunction::Print),
        other => Err((at, format!("{other:?} is not supported"))),
    }
}

/// Parses the name of a header, in quotes.
fn parse_header_name(lexer: &mut TemplateLexer<'_>) -> Result<Box<str>, TemplateSyntaxError> {
    match lexer.next_token()? {
        (_, TemplateToken::Text(text)) => Ok(text.into()),
        (at, other) => Err((at, format!("{} where a name in quotes must be", other.description()))),
    }
}

impl TemplateValue {
    fn of_request(field: RequestField) -> Self {
        Self { source: ValueSource::Request(field), functions: Vec::new() }
    }

    fn push_function(
        &mut self,
        function: TemplateFunction,
        at: usize,
    ) -> Result<(), TemplateSyntaxError> {
        if self.functions.len() == MAX_FUNCTIONS {
            return Err((at, format!("a value goes through at most {MAX_FUNCTIONS} functions")));
        }
        self.functions.push(function);
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
    OpenParenthesis,
    CloseParenthesis,
    /// Closing braces `}}`; true if they trim the text that follows.
    CloseBraces(bool),
    /// End of the whole template.
    End,
}

impl TemplateToken {
    /// Returns true if a value or a function can begin with the token.
    fn begins_operand(&self) -> bool {
        match self {
            Self::Field(_)
            | Self::Name(_)
            | Self::Text(_)
            | Self::Number(_)
            | Self::OpenParenthesis => true,
            Self::Pipe | Self::CloseParenthesis | Self::CloseBraces(_) | Self::End => false,
        }
    }

    /// Returns true if a value or a function can end with the token.
    fn ends_operand(&self) -> bool {
        match self {
            Self::Field(_)
            | Self::Name(_)
            | Self::Text(_)
            | Self::Number(_)
            | Self::CloseParenthesis => true,
            Self::Pipe | Self::OpenParenthesis | Self::CloseBraces(_) | Self::End => false,
        }
    }

    fn description(&self) -> String {
        match self {
            Self::Field(it) | Self::Name(it) | Self::Number(it) => format!("{it:?}"),
            Self::Text(it) => format!("the text {it:?}"),
            Self::Pipe => "\"|\"".into(),
            Self::OpenParenthesis => "\"(\"".into(),
            Self::CloseParenthesis => "\")\"".into(),
            Self::CloseBraces(_) => "\"}}\"".into(),
            Self::End => "the end".into(),
        }
    }
}

/// Lexer of one action.
#[derive(Clone, Copy)]
struct TemplateLexer<'a> {
    source: &'a str,
    offset: usize,
    /// True if a value or a function can end at the offset.
    follows_operand: bool,
}

impl TemplateLexer<'_> {
    /// Returns the next token and its position.
    fn next_token(&mut self) -> Result<(usize, TemplateToken), TemplateSyntaxError> {
        let end = self.offset;
        let (begin, token) = self.read_token()?;
        // As in Go, nothing but a space divides two operands.
        if begin == end && self.follows_operand && token.begins_operand() {
            return Err((begin, format!("a space must be before {}", token.description())));
        }
        self.follows_operand = token.ends_operand();
        Ok((begin, token))
    }

    /// Reads the next token within an action, with its position.
    fn read_token(&mut self) -> Result<(usize, TemplateToken), TemplateSyntaxError> {
        let rest = self.source.get(self.offset..).unwrap_or_default();
        let trimmed = rest.trim_start_matches(SPACES);
        let begin = self.source.len() - trimmed.len();
        if trimmed.starts_with("}}") {
            return Ok(self.token(begin, 2, TemplateToken::CloseBraces(false)));
        }
        // The space before a trimming `-}}` is part of it; without one, `-` would belong to the value.
        if trimmed.starts_with("-}}") && trimmed.len() < rest.len() {
            return Ok(self.token(begin, 3, TemplateToken::CloseBraces(true)));
        }
        // As in Go, letters of all alphabets are part of a name.
        let name_length = |text: &str| {
            text.find(|it: char| it != '_' && !it.is_alphanumeric()).unwrap_or(text.len())
        };
        match trimmed.chars().next() {
            None => Ok(self.token(begin, 0, TemplateToken::End)),
            Some('|') => Ok(self.token(begin, 1, TemplateToken::Pipe)),
            Some('(') => Ok(self.token(begin, 1, TemplateToken::OpenParenthesis)),
            Some(')') => Ok(self.token(begin, 1, TemplateToken::CloseParenthesis)),
            Some('"') => self.read_quoted(begin, trimmed),
            Some('`') => {
                let end = trimmed[1..].find('`').ok_or_else(|| unterminated_text(begin))?;
                Ok(self.token(begin, end + 2, TemplateToken::Text(trimmed[1..=end].to_owned())))
            }
            Some('.') => {
                let is_path = |it: char| it == '.' || it == '_' || it.is_alphanumeric();
                let end = trimmed.find(|it| !is_path(it)).unwrap_or(trimmed.len());
                Ok(self.token(begin, end, TemplateToken::Field(trimmed[..end].to_owned())))
            }
            Some(it) if it.is_ascii_digit() => {
                let end = name_length(trimmed);
                let digits = trimmed[..end].to_owned();
                // Go prints the value of a number: with a leading zero it is octal, and one beyond 64 bits is refused.
                let is_as_printed = |it: i64| it.to_string() == digits;
                if digits.parse().is_ok_and(is_as_printed) {
                    return Ok(self.token(begin, end, TemplateToken::Number(digits)));
                }
                Err((begin, format!("bad number {digits:?}")))
            }
            Some(it) if it == '_' || it.is_alphabetic() => {
                let end = name_length(trimmed);
                Ok(self.token(begin, end, TemplateToken::Name(trimmed[..end].to_owned())))
            }
            Some(it) => Err((begin, format!("{it:?} is not supported"))),
        }
    }

    fn token(
        &mut self,
        begin: usize,
        length: usize,
        token: TemplateToken,
    ) -> (usize, TemplateToken) {
        self.offset = begin + length;
        (begin, token)
    }

    /// Reads a text between double quotes, with Go's common escapes.
    fn read_quoted(
        &mut self,
        begin: usize,
        trimmed: &str,
    ) -> Result<(usize, TemplateToken), TemplateSyntaxError> {
        let (mut text, mut characters) = (String::new(), trimmed.char_indices().skip(1));
        while let Some((at, character)) = characters.next() {
            match character {
                '"' => return Ok(self.token(begin, at + 1, TemplateToken::Text(text))),
                // A text in double quotes may not span lines in Go; one in backquotes may.
                '\n' => break,
                '\\' => match characters.next() {
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
        Err(unterminated_text(begin))
    }
}

fn unterminated_text(at: usize) -> TemplateSyntaxError {
    (at, "unterminated text".to_owned())
}
