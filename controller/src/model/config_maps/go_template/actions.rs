//! Pure: rules of Go's parser for the actions of a template that gotmpl does not check. They are about spaces between
//! operands, comments, numbers, texts, and the place of each control action.
//!
//! Source of the rules: Go's `text/template/parse/lex.go` and `parse.go` of Go 1.26.

/// Spaces between the parts of an action. Go refuses all others there.
const SPACES: [char; 4] = [' ', '\t', '\r', '\n'];

/// Words that are no operands.
const KEYWORDS: [&str; 10] =
    ["block", "break", "continue", "define", "else", "end", "if", "range", "template", "with"];

/// Refuses actions that Go refuses.
pub(super) fn check_actions(source: &str) -> Result<(), String> {
    let (mut rest, mut open) = (source, Vec::new());
    while let Some((_, inside)) = rest.split_once("{{") {
        // `{{- ` trims only if a space follows: `{{-3}}` is a number.
        let trimmed = inside.strip_prefix('-').and_then(|it| it.strip_prefix(SPACES));
        let inside = trimmed.unwrap_or(inside);
        // A comment fills the whole action, without a further space.
        if let Some(comment) = inside.strip_prefix("/*") {
            rest = skip_comment(comment)?;
            continue;
        }
        let (action, after) = read_action(inside)?;
        check_neighbours(&action)?;
        check_declarations(&action)?;
        check_control(&action, &mut open)?;
        rest = after;
    }
    Ok(())
}

/// Returns what follows a comment; `comment` begins with its text.
fn skip_comment(comment: &str) -> Result<&str, String> {
    let (_, end) = comment.split_once("*/").ok_or_else(|| "unclosed comment".to_owned())?;
    let trims = || end.strip_prefix(SPACES)?.strip_prefix("-}}");
    let after = end.strip_prefix("}}").or_else(trims);
    after.ok_or_else(|| "comment ends before closing delimiter".to_owned())
}

/// Kind of a part of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ActionPartKind {
    /// Field, function or literal.
    Operand,
    /// Variable, possibly with fields.
    Variable,
    Keyword,
    OpenParenthesis,
    CloseParenthesis,
    Comma,
    /// One of `:=` and `=`.
    Assignment,
    Pipe,
}

/// Smallest part of an action that has a meaning.
#[derive(Clone, Copy, Debug)]
struct ActionPart<'a> {
    text: &'a str,
    has_space_before: bool,
}

impl ActionPart<'_> {
    fn kind(&self) -> ActionPartKind {
        match self.text.chars().next() {
            Some('$') => ActionPartKind::Variable,
            Some('(') => ActionPartKind::OpenParenthesis,
            Some(')') => ActionPartKind::CloseParenthesis,
            Some(',') => ActionPartKind::Comma,
            Some(':' | '=') => ActionPartKind::Assignment,
            Some('|') => ActionPartKind::Pipe,
            _ if KEYWORDS.contains(&self.text) => ActionPartKind::Keyword,
            _ => ActionPartKind::Operand,
        }
    }

    /// Returns true for the field of a value in parentheses, such as `.A` in `(.B).A`.
    fn is_field(&self) -> bool {
        let name = self.text.strip_prefix('.').and_then(|it| it.chars().next());
        name.is_some_and(|it| it == '_' || it.is_alphabetic())
    }
}

/// Returns the parts of an action, and the text behind its closing braces.
fn read_action(inside: &str) -> Result<(Vec<ActionPart<'_>>, &str), String> {
    let (mut rest, mut parts) = (inside, Vec::new());
    loop {
        let trimmed = rest.trim_start_matches(SPACES);
        let has_space_before = trimmed.len() < rest.len();
        // The space before a trimming `-}}` is part of it.
        let trims = || trimmed.strip_prefix("-}}").filter(|_| has_space_before);
        if let Some(after) = trimmed.strip_prefix("}}").or_else(trims) {
            return Ok((parts, after));
        }
        let (text, after) = trimmed.split_at(part_length(trimmed)?);
        parts.push(ActionPart { text, has_space_before });
        rest = after;
    }
}

/// Returns the length in bytes of the first part of `text`, which is at least 1.
fn part_length(text: &str) -> Result<usize, String> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let number = unsigned.strip_prefix('.').unwrap_or(unsigned);
    // A sign or a dot belongs to a number only before a digit.
    if number.starts_with(|it: char| it.is_ascii_digit()) {
        return number_length(text);
    }
    match text.chars().next() {
        None => Err("unclosed action".to_owned()),
        Some('"') => quoted_length(text, '"'),
        Some('\'') => quoted_length(text, '\''),
        Some('`') => match text[1..].find('`') {
            Some(end) => Ok(end + 2),
            None => Err("unterminated raw quoted string".to_owned()),
        },
        Some('(' | ')' | ',' | '=' | '|') => Ok(1),
        Some(':') if text.starts_with(":=") => Ok(2),
        Some('.' | '$') => Ok(path_length(text)),
        Some(it) if it == '_' || it.is_alphabetic() => Ok(name_length(text)),
        Some(other) => Err(format!("unrecognized character in action: {other:?}")),
    }
}

fn name_length(text: &str) -> usize {
    text.find(|it: char| it != '_' && !it.is_alphanumeric()).unwrap_or(text.len())
}

/// Returns the length of a dot, or of a variable, with the fields that follow it.
fn path_length(text: &str) -> usize {
    let mut length = 1 + name_length(&text[1..]);
    if length == 1 && text.starts_with('.') {
        return length;
    }
    while let Some(field) = text[length..].strip_prefix('.') {
        // A dot without a name, or before a digit, begins a part of its own, which has no space before it.
        let name = name_length(field);
        if name == 0 || field.starts_with(|it: char| it.is_ascii_digit()) {
            break;
        }
        length += 1 + name;
    }
    length
}

/// Returns the length of a text or character in quotes.
fn quoted_length(text: &str, quote: char) -> Result<usize, String> {
    let mut characters = text.char_indices().skip(1);
    while let Some((at, character)) = characters.next() {
        match character {
            // Go permits no line break between quotes.
            '\n' => break,
            '\\' => {
                let escaped = characters.next().map(|(_, it)| it);
                if !escaped.is_some_and(|it| it == quote || "abfnrtvxuU\\01234567".contains(it)) {
                    return Err("invalid syntax: unknown escape in quotes".to_owned());
                }
            }
            it if it == quote && quote == '\'' && at == 1 => {
                return Err("invalid syntax: empty character constant".to_owned());
            }
            it if it == quote => return Ok(at + 1),
            _ => {}
        }
    }
    Err("unterminated quoted string".to_owned())
}

/// Returns the length of a number that Go accepts.
fn number_length(text: &str) -> Result<usize, String> {
    let digits_at = text.len() - text.trim_start_matches(['+', '-']).len();
    let digits = &text[digits_at..];
    let (radix, exponent) = match digits.get(..2) {
        Some("0x" | "0X") => (16, "pP"),
        Some("0o" | "0O") => (8, ""),
        Some("0b" | "0B") => (2, ""),
        _ => (10, "eE"),
    };
    let mut previous = ' ';
    let is_end = |it: char| {
        let is_sign = matches!(it, '+' | '-') && exponent.contains(previous);
        previous = it;
        !(is_sign || matches!(it, '_' | '.') || it.is_alphanumeric())
    };
    let length = digits.find(is_end).unwrap_or(digits.len());
    let number = &digits[..length];
    let has_base = radix != 10;
    let (bytes, body) = (number.as_bytes(), if has_base { &number[2..] } else { number });
    let is_digit = |at: usize| bytes.get(at).is_some_and(|it| char::from(*it).is_digit(radix));
    // One underscore may follow the base; any other stands between two digits.
    let is_separator =
        |at: usize| is_digit(at + 1) && (at == 2 && has_base || at > 0 && is_digit(at - 1));
    let is_letter = |it: char| "_.+-".contains(it) || exponent.contains(it) || it.is_digit(radix);
    let has_exponent = body.contains(|it: char| exponent.contains(it));
    let are_dots_valid = match (number.matches('.').count(), radix) {
        (0, _) | (1, 10) => true,
        (1, 16) => has_exponent,
        _ => false,
    };
    // A leading zero makes an integer octal.
    let is_octal = !has_base && !has_exponent && number.starts_with('0') && !number.contains('.');
    let is_too_large = number.replace('_', "").parse::<f64>().is_ok_and(f64::is_infinite);
    let is_valid = number.match_indices('_').all(|(at, _)| is_separator(at))
        && body.chars().all(is_letter)
        && are_dots_valid
        && !(is_octal && number.contains(['8', '9']))
        && !is_too_large;
    if is_valid { Ok(digits_at + length) } else { Err(format!("bad number syntax: {number:?}")) }
}

/// Refuses operands without a space between them.
fn check_neighbours(action: &[ActionPart<'_>]) -> Result<(), String> {
    use ActionPartKind as Kind;
    for (at, pair) in action.windows(2).enumerate() {
        let [before, after] = pair else { continue };
        // The name of a template is no operand: it may touch the pipeline behind it.
        let is_name = at > 0 && matches!(action[at - 1].text, "block" | "template");
        if after.has_space_before || is_name {
            continue;
        }
        let is_bad = match (before.kind(), after.kind()) {
            (Kind::CloseParenthesis, Kind::Operand) => !after.is_field(),
            (
                Kind::Operand | Kind::Variable | Kind::CloseParenthesis,
                Kind::Operand | Kind::Variable | Kind::OpenParenthesis,
            )
            | (Kind::Keyword, Kind::Variable) => true,
            (Kind::Operand | Kind::Variable, Kind::Assignment) => after.text == "=",
            (Kind::Keyword, Kind::Operand) => !after.text.starts_with('.'),
            _ => false,
        };
        if is_bad {
            return Err(format!("unexpected {:?}: a space must be before it", after.text));
        }
    }
    Ok(())
}

/// Refuses declarations in which a comma between two variables is missing, or a variable behind a comma.
fn check_declarations(action: &[ActionPart<'_>]) -> Result<(), String> {
    use ActionPartKind as Kind;
    let kinds: Vec<Kind> = action.iter().map(ActionPart::kind).collect();
    let lacks_variable = |pair: &[Kind]| pair[0] == Kind::Comma && pair[1] != Kind::Variable;
    let lacks_comma = |it: &[Kind]| it == [Kind::Variable, Kind::Variable, Kind::Assignment];
    if kinds.windows(2).any(lacks_variable) || kinds.windows(3).any(lacks_comma) {
        return Err("range can only initialize variables, with a comma between two".to_owned());
    }
    Ok(())
}

/// Control action whose `{{end}}` has not come yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenControl {
    If,
    With,
    Range,
    /// Part `{{else}}` of a `{{range}}`.
    RangeElse,
    /// Body of another template: `{{define}}` or `{{block}}`.
    Template,
}

/// Refuses a control action in a place where it has no meaning. `open` are the controls around it.
fn check_control(action: &[ActionPart<'_>], open: &mut Vec<OpenControl>) -> Result<(), String> {
    let word = |at: usize| action.get(at).map(|it| it.text);
    match word(0) {
        Some("if") => open.push(OpenControl::If),
        Some("with") => open.push(OpenControl::With),
        Some("range") => open.push(OpenControl::Range),
        Some("block") if action.len() < 3 => {
            return Err("missing value for block clause".to_owned());
        }
        Some("define") if !open.is_empty() => {
            return Err("unexpected {{define}} inside of another control action".to_owned());
        }
        Some("block" | "define") => open.push(OpenControl::Template),
        Some("end") => drop(open.pop()),
        Some("else") => match (open.last_mut(), word(1)) {
            (Some(OpenControl::If), Some("if")) | (Some(OpenControl::With), Some("with")) => {}
            (_, Some(other)) => return Err(format!("unexpected {{{{else {other}}}}}")),
            // The part behind `else` is no loop, so it may have no `break`.
            (Some(last), None) if *last == OpenControl::Range => *last = OpenControl::RangeElse,
            (_, None) => {}
        },
        Some(word @ ("break" | "continue")) => {
            // A template within the loop is run elsewhere, and cannot leave it.
            let mut inner = open.iter().rev().take_while(|it| **it != OpenControl::Template);
            if !inner.any(|it| *it == OpenControl::Range) {
                return Err(format!("{{{{{word}}}}} outside {{{{range}}}}"));
            }
        }
        Some(_) | None => {}
    }
    Ok(())
}
