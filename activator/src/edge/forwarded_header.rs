//! Pure: parser and writer of the header `Forwarded` (RFC 7239).

/// One element of the header: one hop, as it was reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardedElement<'a> {
    /// Text of the element, unchanged.
    pub text: &'a str,
    /// Value of the parameter `for`: the hop's address or an identifier.
    pub forwarded_for: Option<String>,
    /// Value of the parameter `host`.
    pub host: Option<String>,
    /// Value of the parameter `proto`.
    pub proto: Option<String>,
}

/// Entries of a list with commas, without empty ones.
pub fn split_list(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim).filter(|it| !it.is_empty())
}

/// Parses the whole field. `None`: it violates the grammar somewhere, so that its elements cannot be separated.
pub fn parse_elements(field: &str) -> Option<Vec<ForwardedElement<'_>>> {
    let all = split_unquoted(field, ',')?.into_iter().map(str::trim).filter(|it| !it.is_empty());
    all.map(parse_element).collect()
}

fn parse_element(text: &str) -> Option<ForwardedElement<'_>> {
    let mut element = ForwardedElement { text, forwarded_for: None, host: None, proto: None };
    for pair in split_unquoted(text, ';')?.into_iter().map(str::trim).filter(|it| !it.is_empty()) {
        let (name, value) = pair.split_once('=')?;
        let value = unquote(value)?;
        let to = match name.to_ascii_lowercase().as_str() {
            "for" => &mut element.forwarded_for,
            "host" => &mut element.host,
            "proto" => &mut element.proto,
            other if is_token(other) => continue,
            _ => return None,
        };
        // A parameter may occur once in each element (section 4).
        if to.replace(value).is_some() {
            return None;
        }
    }
    Some(element)
}

/// Parts between separators outside of quotes. `None`: a quote has no end.
fn split_unquoted(text: &str, by: char) -> Option<Vec<&str>> {
    let (mut parts, mut from) = (Vec::new(), 0);
    let (mut is_quoted, mut is_escaped) = (false, false);
    // A separator within quotes is text, and a backslash there makes the next character text.
    for (at, letter) in text.char_indices() {
        match letter {
            _ if is_escaped => is_escaped = false,
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            _ if letter == by && !is_quoted => {
                parts.push(&text[from..at]);
                from = at + letter.len_utf8();
            }
            _ => {}
        }
    }
    parts.push(&text[from..]);
    (!is_quoted).then_some(parts)
}

/// Value of a token or of a quoted string.
fn unquote(text: &str) -> Option<String> {
    let Some(quoted) = text.strip_prefix('"') else {
        return is_token(text).then(|| text.to_owned());
    };
    let (mut out, mut letters) = (String::new(), quoted.chars());
    while let Some(letter) = letters.next() {
        match letter {
            // A quoted string has to be the whole value: text behind its end violates the grammar.
            '"' => return letters.next().is_none().then_some(out),
            '\\' => out.push(letters.next()?),
            other => out.push(other),
        }
    }
    None
}

fn is_token(text: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(is_letter)
}

/// Writes `for=<first>;host=<host>;proto=<proto>, for=<next>…`, as Knative's sidecar does.
pub fn format_forwarded(hops: &[&str], host: Option<&str>, proto: Option<&str>) -> String {
    let mut hops = hops.iter();
    let mut text = format!("for={}", format_node(hops.next().copied().unwrap_or("unknown")));
    for (name, value) in [("host", host), ("proto", proto)] {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            text.push_str(&format!(";{name}={}", quote(value)));
        }
    }
    for hop in hops {
        text.push_str(", for=");
        text.push_str(&format_node(hop));
    }
    text
}

/// Hop in the form of the parameter `for`.
pub fn format_node(hop: &str) -> String {
    match hop.parse::<std::net::Ipv6Addr>() {
        Ok(six) => format!("\"[{six}]\""),
        Err(_) => quote(hop),
    }
}

/// Token unchanged, anything else as a quoted string (RFC 9110 §5.6), so that no text can end the field early.
fn quote(text: &str) -> String {
    if is_token(text) {
        return text.to_owned();
    }
    let mut out = String::from("\"");
    for letter in text.chars() {
        if matches!(letter, '"' | '\\') {
            out.push('\\');
        }
        out.push(letter);
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(field: &str) -> Option<Vec<[Option<String>; 3]>> {
        let all = parse_elements(field)?.into_iter();
        Some(all.map(|it| [it.forwarded_for, it.host, it.proto]).collect())
    }

    #[test]
    fn elements_are_read_by_the_grammar() {
        let field =
            "for=192.0.2.43;Proto=https;by=x, For=\"[2001:db8::1]:7\"; host=\"a,b;\\\"c\",,";
        let want = [
            [Some("192.0.2.43"), None, Some("https")],
            [Some("[2001:db8::1]:7"), Some("a,b;\"c"), None],
        ];
        let want = want.map(|it| it.map(|it| it.map(str::to_owned))).to_vec();
        assert_eq!(read(field), Some(want));
        assert_eq!(read(""), Some(vec![]));
    }

    #[test]
    fn what_breaks_the_grammar_is_not_read_in_part() {
        for bad in
            ["for=\"a", "for", "for=a;for=b", "for=\"a\"b", "for=a b", "for=, for=a", "x y=a"]
        {
            assert_eq!(parse_elements(bad), None, "{bad}");
        }
    }
}
