use proptest::prelude::*;

use super::*;

/// Calls `then` with a request that has these headers.
fn with_request<T>(
    target: &str,
    headers: &[(&str, &str)],
    then: impl FnOnce(&LoggedRequest<'_>) -> T,
) -> T {
    let all = |name: &str| {
        let values = headers.iter().filter(|(it, _)| it.eq_ignore_ascii_case(name));
        values.map(|(_, value)| (*value).to_owned()).collect()
    };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    then(&LoggedRequest {
        method: "GET",
        target,
        path,
        query,
        host: "hello.example.com",
        version: (1, 1),
        remote: "[fd00::7]:4711".parse().unwrap(),
        length: 0,
        headers: &all,
    })
}

const RESPONSE: LoggedResponse = LoggedResponse { code: 200, size: 5, latency: 0.25 };

fn revision() -> LoggedRevision<'static> {
    LoggedRevision {
        name: "hello-00001",
        namespace: "default",
        service: "hello",
        configuration: "hello-c",
        pod_name: "hello-00001-x",
        pod_ip: Some("10.1.0.7".parse().unwrap()),
    }
}

fn fill_template(
    source: &str,
    target: &str,
    headers: &[(&str, &str)],
) -> Result<String, LogTemplateError> {
    let template = LogTemplate::parse(source)?;
    let captured = with_request(target, headers, |request| template.capture(request));
    let mut line = template.render_line(&captured, &RESPONSE, &revision());
    assert_eq!(line.pop(), Some('\n'), "{source}");
    Ok(line)
}

/// Fills a template with a request of usual headers.
fn fill_usual(source: &str) -> Result<String, LogTemplateError> {
    fill_template(source, "/a%20b?c=d", &[("User-Agent", "curl/8"), ("X-A", "1"), ("x-a", "2")])
}

#[test]
fn the_usual_line_is_json_with_every_figure() {
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let headers =
        [("User-Agent", "it's \"me\"\\"), ("Referer", "http://a/<b>"), ("Traceparent", parent)];
    let json: serde_json::Value =
        serde_json::from_str(&fill_template(DEFAULT_TEMPLATE, "/a?b=c&d", &headers).unwrap())
            .unwrap();
    let want = serde_json::json!({
        "httpRequest": {
            "requestMethod": "GET", "requestUrl": "/a?b=c&d", "requestSize": "0", "status": 200,
            "responseSize": "5", "userAgent": "it's \"me\"\\", "remoteIp": "[fd00::7]:4711",
            "serverIp": "10.1.0.7", "referer": "http://a/<b>", "latency": "0.25s",
            "protocol": "HTTP/1.1",
        },
        "traceId": "0af7651916cd43dd8448eb211c80319c",
    });
    assert_eq!(json, want);
}

#[test]
fn every_field_and_function_prints_what_it_prints_in_go() {
    for (source, expected) in [
        ("plain", "plain"),
        ("", ""),
        ("{{.Request.Method}} {{.Request.RequestURI}}", "GET /a%20b?c=d"),
        ("{{.Request.URL}} {{.Request.URL.Path}} {{.Request.URL.RawQuery}}", "/a%20b?c=d /a b c=d"),
        ("{{.Request.Host}} {{.Request.RemoteAddr}}", "hello.example.com [fd00::7]:4711"),
        ("{{.Request.Proto}} {{.Request.ProtoMajor}}{{.Request.ProtoMinor}}", "HTTP/1.1 11"),
        ("{{.Request.UserAgent}}{{.Request.Referer}}", "curl/8"),
        (r#"{{index .Request.Header "X-A"}}"#, "[1 2]"),
        (r#"{{index .Request.Header "X-B"}}"#, "[]"),
        (r#"{{index .Request.Header "X-A" 0}}"#, "1"),
        (r#"{{.Request.Header.Get "X-A"}}"#, "1"),
        (r#"{{js (index .Request.Header "X-A")}}"#, "[1 2]"),
        (r#"{{.Request.Header.Get `X-A` | js | print}}"#, "1"),
        ("{{.Response.Code}} {{.Response.Size}} {{.Response.Latency}}", "200 5 0.25"),
        ("{{.Revision.Namespace}}/{{.Revision.Name}}", "default/hello-00001"),
        ("{{.Revision.Service}} {{.Revision.Configuration}}", "hello hello-c"),
        ("{{.Revision.PodName}} {{.Revision.PodIP}}", "hello-00001-x 10.1.0.7"),
        ("[{{.TraceID}}]", "[]"),
        ("a {{- /* nothing */ -}} b", "ab"),
        ("a {{- .Response.Code -}} b", "a200b"),
        ("a\u{a0}{{- /* nothing */ -}}\n\u{a0}b", "a\u{a0}\u{a0}b"),
        (r#"{{(index .Request.Header "X-A")|js}}{{/**/}}"#, "[1 2]"),
        (r#"{{"{{"}}{{print 7}}"#, "{{7"),
        (r#"{{html "<a href='b'>"}}"#, "&lt;a href=&#39;b&#39;&gt;"),
        (r#"{{urlquery "a b&c~"}}"#, "a+b%26c~"),
        (r#"{{js "a=<b>'\n\"\\é"}}"#, "a\\u003D\\u003Cb\\u003E\\u0027\\u000A\\\"\\\\é"),
    ] {
        assert_eq!(fill_usual(source).as_deref(), Ok(expected), "{source}");
    }
}

#[test]
fn unsupported_syntax_is_refused_with_its_position() {
    for (source, at, what) in [
        ("{{if .TraceID}}a{{end}}", (1, 3), "\"if\" is not supported"),
        ("a\n b{{ range .Request.Header }}", (2, 6), "\"range\" is not supported"),
        ("{{.Request.Body}}", (1, 3), "there is no .Request.Body"),
        ("{{.Request.Header}}", (1, 3), "there is no .Request.Header"),
        ("{{.}}", (1, 3), "there is no ."),
        ("{{$x := .TraceID}}", (1, 3), "'$' is not supported"),
        ("{{.TraceID", (1, 1), "unclosed action"),
        ("{{/* a }}", (1, 1), "unclosed comment"),
        ("{{}}", (1, 3), "missing value for command"),
        ("{{js}}", (1, 5), "missing value for command"),
        ("{{printf \"%s\" .TraceID}}", (1, 3), "\"printf\" is not supported"),
        ("{{js .TraceID .TraceID}}", (1, 15), "unexpected \".TraceID\" in it"),
        ("{{.TraceID | 7}}", (1, 14), "\"7\" where a function must be"),
        ("{{index .TraceID \"a\"}}", (1, 9), "index is for .Request.Header, not for \".TraceID\""),
        ("{{index .Request.Header 1}}", (1, 25), "\"1\" where a name in quotes must be"),
        ("{{(.TraceID}}", (1, 12), "\"}}\" where ) must be"),
        ("{{((((((((((.TraceID))))))))))}}", (1, 11), "too many parentheses"),
        ("{{\"a}}", (1, 3), "unterminated text"),
        ("{{js .TraceID | js | js}}", (1, 22), "a value goes through at most 2 functions"),
        ("{{ /* a */}}", (1, 4), "'/' is not supported"),
        ("{{-  /* a */}}", (1, 6), "'/' is not supported"),
        ("{{/* a */ }}", (1, 10), "a comment must end before }}"),
        ("{{- /* a */  -}}", (1, 12), "a comment must end before }}"),
        ("{{js\"a\"}}", (1, 5), "a space must be before the text \"a\""),
        ("{{js.TraceID}}", (1, 5), "a space must be before \".TraceID\""),
        ("{{js(.TraceID)}}", (1, 5), "a space must be before \"(\""),
        ("{{index .Request.Header\"a\"}}", (1, 24), "a space must be before the text \"a\""),
        ("{{index .Request.Header \"a\"0}}", (1, 28), "a space must be before \"0\""),
        ("{{(js .TraceID)(js .TraceID)}}", (1, 16), "a space must be before \"(\""),
        ("{{print 007}}", (1, 9), "bad number \"007\""),
        ("{{print 99999999999999999999}}", (1, 9), "bad number \"99999999999999999999\""),
        ("{{\u{a0}.TraceID}}", (1, 3), "'\\u{a0}' is not supported"),
    ] {
        let (line, column) = at;
        let want = LogTemplateError { line, column, what: what.to_owned() };
        assert_eq!(LogTemplate::parse(source), Err(want), "{source}");
    }
    let long = "a".repeat(MAX_TEMPLATE_BYTES + 1);
    assert_eq!(LogTemplate::parse(&long).unwrap_err().what, "it is longer than 4096 bytes");
    let many = "{{.TraceID}}".repeat(MAX_VALUES + 1);
    assert_eq!(LogTemplate::parse(&many).unwrap_err().what, "it has more than 32 values");
    let message = LogTemplate::parse("{{with .TraceID}}").unwrap_err().to_string();
    let start = "template: requestLog:1:3: \"with\" is not supported; a template may have .Request (Method,";
    assert!(message.starts_with(start) && message.contains(".TraceID"), "{message}");
}

#[test]
fn free_text_that_nothing_escapes_is_named() {
    let source =
        r#"{{.Request.Method}}{{.Request.Host}}{{js .Request.URL}}{{index .Request.Header "X"}}"#;
    let template = LogTemplate::parse(source).unwrap();
    assert_eq!(template.unescaped_values(), [".Request.Host", "the header X"]);
    assert_eq!(LogTemplate::parse(DEFAULT_TEMPLATE).unwrap().unescaped_values(), [] as [&str; 0]);
}

#[test]
fn a_long_value_is_cut_where_a_character_ends() {
    let target = format!("/{}", "é".repeat(3000));
    let line = fill_template("{{.Request.RequestURI}}", &target, &[]).unwrap();
    // The next character has two bytes, and only one of them would fit; three dots follow.
    assert_eq!(line.len(), MAX_VALUE_BYTES - 1 + 3);
    assert!(line.ends_with("é..."));
}

#[test]
fn numbers_are_printed_as_go_prints_them() {
    for (value, expected) in [
        (0.0, "0"),
        (1.0, "1"),
        (0.25, "0.25"),
        (0.0001, "0.0001"),
        (0.000_012_5, "1.25e-05"),
        (1e-10, "1e-10"),
        (123_456.5, "123456.5"),
        (2e21, "2e+21"),
        // Go prints NaN, which JSON does not have.
        (f64::NAN, "0"),
    ] {
        assert_eq!(escape::format_go_float(value), expected);
    }
}

#[test]
fn only_an_identifier_counts_as_a_trace() {
    for (name, value, expected) in [
        ("X-B3-TraceId", "463ac35c9f6413ad", "463ac35c9f6413ad"),
        ("X-B3-TraceId", "463ac35c9f6413ad48485a3953bb6124", "463ac35c9f6413ad48485a3953bb6124"),
        ("X-B3-TraceId", "463ac35c9f6413a\"", ""),
        ("traceparent", "00-no-b7ad6b7169203331-01", ""),
    ] {
        assert_eq!(fill_template("{{.TraceID}}", "/", &[(name, value)]).as_deref(), Ok(expected));
    }
}

/// Generates templates of valid and invalid pieces.
fn templates() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("{{".to_owned()),
        Just("}}".to_owned()),
        Just("{{- ".to_owned()),
        Just(" -}}".to_owned()),
        Just("{{js .Request.RequestURI}}".to_owned()),
        Just("index .Request.Header \"a\"".to_owned()),
        Just("/*".to_owned()),
        Just("*/".to_owned()),
        "[.()|\"`\\\\ a-z0-9é]{0,6}",
        any::<String>(),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|all| all.concat())
}

proptest! {
    #[test]
    fn no_template_panics_and_every_good_one_makes_a_line(
        source in templates(), target in any::<String>(), value in any::<String>(),
    ) {
        if let Ok(template) = LogTemplate::parse(&source) {
            let headers = [("a", value.as_str())];
            let captured = with_request(&target, &headers, |request| template.capture(request));
            let line = template.render_line(&captured, &RESPONSE, &revision());
            prop_assert!(line.ends_with('\n'));
            prop_assert!(line.matches('\n').count() <= source.matches('\n').count() + 1);
        }
    }

    #[test]
    fn no_value_breaks_its_line_or_its_json(target in any::<String>(), value in any::<String>()) {
        let source = r#"{"a": "{{js .Request.RequestURI}}", "b": "{{.Request.UserAgent | js}}"}"#;
        let line = fill_template(source, &target, &[("User-Agent", &value)]).unwrap();
        prop_assert!(!line.contains(|it: char| it.is_control()));
        let json: serde_json::Value = serde_json::from_str(&line).unwrap();
        prop_assert_eq!(json["a"].as_str(), Some(&*escape::truncate_value(target.into())));
        prop_assert_eq!(json["b"].as_str(), Some(&*escape::truncate_value(value.into())));
    }

    #[test]
    fn no_value_breaks_its_line_though_nothing_escapes_it(value in any::<String>()) {
        let source = r#"{{.Request.URL.Path}}{{.Request.Host}}{{index .Request.Header "a"}}"#;
        let line = fill_template(source, &value, &[("a", &value)]).unwrap();
        prop_assert!(!line.contains(|it: char| it.is_control()), "{line:?}");
    }
}
