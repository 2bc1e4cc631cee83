use proptest::prelude::*;

use super::*;

const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 9));

fn sent(side: Side, fields: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(
            name.parse::<HeaderName>().expect("a name"),
            HeaderValue::from_str(value).expect("a value"),
        );
    }
    forwarded(&mut headers, side, CLIENT);
    headers
}

fn field<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().expect("text"))
}

#[test]
fn the_app_learns_who_asked() {
    let told = sent(Side::Inside, &[("host", "a:80")]);
    assert_eq!(field(&told, "forwarded"), Some("for=10.0.0.9;host=\"a:80\";proto=http"));
    assert_eq!(field(&told, "x-forwarded-for"), Some("10.0.0.9"));
    assert_eq!(field(&told, "x-forwarded-host"), Some("a:80"));
    let told = sent(Side::Inside, &[("host", "a"), ("x-forwarded-proto", "https")]);
    assert_eq!(field(&told, "forwarded"), Some("for=10.0.0.9;host=a;proto=https"));
    let told = sent(Side::Inside, &[("host", "a"), ("forwarded", "for=x")]);
    assert_eq!(field(&told, "forwarded"), Some("for=x"));
}

#[test]
fn from_outside_only_the_way_is_taken_over() {
    let told = sent(
        Side::Outside,
        &[
            ("host", "a"),
            ("x-forwarded-for", "fd00::7"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "evil"),
            ("forwarded", "for=evil;proto=https"),
        ],
    );
    let way = "for=\"[fd00::7]\";host=a;proto=http, for=10.0.0.9";
    assert_eq!(field(&told, "forwarded"), Some(way));
    assert_eq!(field(&told, "x-forwarded-for"), Some("fd00::7, 10.0.0.9"));
    assert_eq!(field(&told, "x-forwarded-proto"), Some("http"));
    assert_eq!(field(&told, "x-forwarded-host"), Some("a"));
}

#[test]
fn who_writes_an_address_cannot_write_more_than_that() {
    let told = sent(Side::Inside, &[("host", "a"), ("x-forwarded-for", "x;proto=\"https")]);
    let way = "for=\"x;proto=\\\"https\";host=a;proto=http, for=10.0.0.9";
    assert_eq!(field(&told, "forwarded"), Some(way));
}

#[test]
fn a_trace_begins_here_unless_it_has_begun() {
    let trace = |given: &[&str]| {
        let mut headers = HeaderMap::new();
        for it in given {
            headers.append(TRACEPARENT, HeaderValue::from_str(it).expect("a value"));
        }
        headers.insert(TRACESTATE, HeaderValue::from_static("a=b"));
        traced(&mut headers, || 7);
        let all = headers.get_all(TRACEPARENT).iter().map(|it| it.to_str().expect("text"));
        (all.collect::<Vec<_>>().join(" "), headers.contains_key(TRACESTATE))
    };
    let given = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    assert_eq!(trace(&[given]), (given.to_owned(), true));
    let later = "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more";
    assert_eq!(trace(&[later]), (later.to_owned(), true));
    let begun = ("00-00000000000000070000000000000007-0000000000000007-00".to_owned(), false);
    for bad in [
        &[][..],
        &[given, given],
        &["00-00000000000000000000000000000000-00f067aa0ba902b7-01"],
        &["00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01"],
        &["00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01"],
        &["ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"],
        &["00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more"],
        &["00"],
    ] {
        assert_eq!(trace(bad), begun, "{bad:?}");
    }
}

/// Reads `Forwarded` by its grammar (RFC 7239, section 4) and returns each element's pairs.
fn parse(text: &str) -> Option<Vec<Vec<(String, String)>>> {
    let (mut rest, mut elements) = (text, vec![vec![]]);
    loop {
        let at = rest.find('=')?;
        let name = &rest[..at];
        let (value, after) = value(&rest[at + 1..])?;
        elements.last_mut()?.push((name.to_owned(), value));
        if after.is_empty() {
            return Some(elements);
        }
        rest = match after.strip_prefix(';') {
            Some(next) => next,
            None => {
                elements.push(vec![]);
                after.strip_prefix(", ")?
            }
        };
    }
}

fn value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([';', ',']).unwrap_or(text.len());
        let is_token =
            |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        let token = &text[..end];
        let is_value = !token.is_empty() && token.bytes().all(is_token);
        return is_value.then(|| (token.to_owned(), &text[end..]));
    };
    let (mut out, mut letters) = (String::new(), quoted.char_indices());
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((out, &quoted[at + 1..])),
            '\\' => out.push(letters.next()?.1),
            other => out.push(other),
        }
    }
    None
}

proptest! {
    /// Whatever a client writes, `Forwarded` keeps its grammar, ends with the client we saw, and says of host and
    /// protocol what is true.
    #[test]
    fn forwarded_keeps_its_grammar(
        way in proptest::option::of("[ -~]{0,40}"),
        host in "[a-z0-9.:-]{1,20}",
        proto in proptest::option::of("[ -~]{1,10}"),
        outside: bool,
    ) {
        let side = if outside { Side::Outside } else { Side::Inside };
        let mut fields = vec![("host", host.as_str())];
        fields.extend(way.as_deref().map(|way| ("x-forwarded-for", way)));
        fields.extend(proto.as_deref().map(|proto| ("x-forwarded-proto", proto)));
        let told = sent(side, &fields);
        let text = field(&told, "forwarded").expect("always written");
        let elements = parse(text);
        prop_assert!(elements.is_some(), "{}", text);
        let elements = elements.unwrap_or_default();
        let last = elements.last().and_then(|it| it.first()).cloned();
        prop_assert_eq!(last, Some(("for".to_owned(), "10.0.0.9".to_owned())));
        let said = |name: &str| {
            elements[0].iter().find(|(it, _)| it == name).map(|(_, value)| value.clone())
        };
        prop_assert_eq!(said("host"), Some(host.clone()));
        if outside {
            prop_assert_eq!(said("proto"), Some("http".to_owned()));
        }
        let added = field(&told, "x-forwarded-for").is_some_and(|way| way.ends_with("10.0.0.9"));
        prop_assert!(added);
    }

    /// A trace that begins here can be read by those that follow.
    #[test]
    fn a_begun_trace_is_valid(numbers: [u64; 3]) {
        let mut headers = HeaderMap::new();
        let mut numbers = numbers.into_iter();
        traced(&mut headers, || numbers.next().unwrap_or(0));
        prop_assert!(is_traceparent(headers[TRACEPARENT].as_bytes()));
    }
}
