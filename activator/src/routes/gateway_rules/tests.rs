//! Pure: the rule that a request gets, compared with a reference that reads the specification's text.

use common::fixtures::http_rule as rule;
use http::Request;
use proptest::prelude::*;

use super::*;

fn exact(path: &str) -> PathMatch {
    PathMatch::parse_exact(path).unwrap()
}

fn prefix(path: &str) -> PathMatch {
    PathMatch::Prefix(PathPrefix::parse(path).unwrap())
}

/// Returns rules whose routes are named by their numbers.
fn host(rules: Vec<HttpRule>) -> GatewayHostRules {
    let named = rules.into_iter().enumerate().map(|(at, rule)| {
        let rule = HttpRule { route: NamespacedName::new("default", at.to_string()), ..rule };
        GatewayRule::new("*".into(), rule, Vec::new())
    });
    GatewayHostRules::new("http://*".parse().unwrap(), Vec::new(), &[], named.collect())
}

fn head(method: &str, uri: &str, fields: &[(&str, &str)]) -> request::Parts {
    let builder = Request::builder().method(method).uri(uri);
    let builder = fields.iter().fold(builder, |it, (name, value)| it.header(*name, *value));
    builder.body(()).unwrap().into_parts().0
}

/// Returns the number of the rule that a request gets.
fn found(host: &GatewayHostRules, head: &request::Parts) -> Result<usize, HostPathError> {
    host.find(head).map(|it| it.route.name.parse().unwrap())
}

#[test]
fn a_longer_prefix_that_does_not_fit_otherwise_leaves_the_request_to_a_shorter_one() {
    let posts = HttpRule { method: Some("POST".into()), ..rule(prefix("/a/b")) };
    let host = host(vec![rule(exact("/a/b")), posts, rule(prefix("/a")), rule(exact("/"))]);
    for (method, path, expected) in [
        ("GET", "/a/b", Ok(0)),
        ("POST", "/a/b", Ok(0)),
        ("POST", "/a/b/", Ok(1)),
        ("POST", "/a/b/c", Ok(1)),
        ("GET", "/a/b/", Ok(2)),
        ("GET", "/a/bc", Ok(2)),
        ("GET", "/%61/b", Ok(0)),
        ("GET", "/", Ok(3)),
        ("GET", "/?a=b", Ok(3)),
        ("GET", "/b", Err(HostPathError::NoRule)),
        ("GET", "/ab", Err(HostPathError::NoRule)),
        ("GET", "/a/../b", Err(HostPathError::UnclearPath)),
        ("GET", "/a//b", Err(HostPathError::UnclearPath)),
        ("GET", "/a%2Fb", Err(HostPathError::UnclearPath)),
    ] {
        assert_eq!(found(&host, &head(method, path, &[])), expected, "{method} {path}");
    }
}

/// Without paths in the rules, servers cannot disagree about them.
#[test]
fn rules_for_all_paths_take_every_path() {
    let host = host(vec![rule(prefix("/"))]);
    for path in ["/", "/a/../b", "//", "/a%2Fb", "/a;b", "*"] {
        assert_eq!(found(&host, &head("GET", path, &[])), Ok(0), "{path}");
    }
}

/// By a `..` behind the prefix in place of `/`, a server would leave that prefix.
#[test]
fn a_rule_that_replaces_the_prefix_of_all_paths_takes_no_path_that_may_leave_it() {
    let modifier = PathModifier::parse_prefix("/x");
    let rewritten =
        HttpRule { rewrite: Some(UrlRewrite { host: None, path: modifier }), ..rule(prefix("/")) };
    let host = host(vec![rewritten]);
    for path in ["/a/../b", "/..", "/a/%2e%2e/"] {
        let unclear = Err(HostPathError::UnclearPath);
        assert_eq!(found(&host, &head("GET", path, &[])), unclear, "{path}");
    }
    for (path, expected) in [("/a//b?c", "/x/a//b?c"), ("/", "/x/")] {
        assert_eq!(found(&host, &head("GET", path, &[])), Ok(0), "{path}");
        let target = host.rules[0].rewritten_target(path.as_bytes());
        assert_eq!(target, Some(Ok(expected.as_bytes().to_vec())));
    }
}

#[test]
fn headers_and_parameters_are_compared_whole() {
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let both = HttpRule {
        headers: vec![pair("version", "2"), pair("color", "a,b")],
        query: vec![pair("q", "x y")],
        ..rule(prefix("/"))
    };
    let host = host(vec![both]);
    let fits = |uri: &str, fields: &[(&str, &str)]| found(&host, &head("GET", uri, fields)).is_ok();
    let fields = [("Version", "2"), ("color", "a"), ("color", "b")];
    assert!(fits("/?p=1&q=x%20y&q=z", &fields));
    assert!(fits("/?q=x+y", &[("version", "2"), ("color", "a,b")]));
    assert!(!fits("/?q=z&q=x+y", &fields), "the first parameter counts");
    assert!(!fits("/", &fields));
    assert!(!fits("/?q=x+y", &fields[..2]));
    assert!(!fits("/?q=x+y", &[("version", "22"), ("color", "a,b")]));
}

#[test]
fn backends_get_requests_by_their_weights() {
    let target = |at: &str| RoutedTarget::Service(NamespacedName::new("default", at));
    let backend = |weight: u32, at: &str| RoutedBackend {
        weight,
        target: target(at),
        request_headers: HeaderEdits::default(),
        response_headers: HeaderEdits::default(),
    };
    let backends = vec![backend(1, "0"), backend(9, "1")];
    let rule = Arc::new(GatewayRule::new("*".into(), rule(prefix("/")), backends));
    let picked = |random| match PickedBackend::pick(&rule, random).unwrap().target() {
        RoutedTarget::Service(name) => name.name.to_string(),
        other => panic!("{other:?}"),
    };
    let second = (0..1000).filter(|random| picked(*random) == "1").count();
    assert_eq!(second, 900);
    let none = GatewayRule::new("*".into(), self::rule(prefix("/")), Vec::new());
    assert!(PickedBackend::pick(&Arc::new(none), 7).is_none());
}

#[derive(Clone, Debug)]
struct RandomRule {
    is_exact: bool,
    segments: Vec<u8>,
    method: Option<bool>,
    has_header: bool,
}

fn random_rule() -> impl Strategy<Value = RandomRule> {
    let segments = proptest::collection::vec(0u8..3, 0..3);
    let fields = (any::<bool>(), segments, any::<Option<bool>>(), any::<bool>());
    fields.prop_map(|(is_exact, segments, method, has_header)| RandomRule {
        is_exact,
        segments,
        method,
        has_header,
    })
}

fn path_of(segments: &[u8]) -> String {
    let names = segments.iter().map(|it| ["/a", "/b", "/ab"][usize::from(*it)]);
    let path: String = names.collect();
    if path.is_empty() { "/".to_owned() } else { path }
}

fn method_name(is_post: bool) -> &'static str {
    if is_post { "POST" } else { "GET" }
}

proptest! {
    /// On clear paths, the first rule counts whose conditions all hold by their words in the specification.
    #[test]
    fn a_request_gets_the_first_rule_that_fits(
        rules in proptest::collection::vec(random_rule(), 0..6),
        segments in proptest::collection::vec(0u8..3, 0..4),
        is_post in any::<bool>(),
        has_header in any::<bool>(),
    ) {
        // The reference knows no index of prefixes: it asks each rule by itself.
        let path = path_of(&segments);
        let expected = rules.iter().position(|it| {
            let fits = match it.is_exact {
                true => path_of(&it.segments) == path,
                false => segments.starts_with(&it.segments),
            };
            fits && it.method.is_none_or(|it| it == is_post) && (has_header || !it.has_header)
        });
        let all = rules.iter().map(|it| {
            let path = path_of(&it.segments);
            HttpRule {
                method: it.method.map(|it| method_name(it).to_owned()),
                headers: it.has_header.then(|| ("h".into(), "1".into())).into_iter().collect(),
                ..rule(if it.is_exact { exact(&path) } else { prefix(&path) })
            }
        });
        let host = host(all.collect());
        let fields: &[(&str, &str)] = if has_header { &[("h", "1")] } else { &[] };
        let head = head(method_name(is_post), &path, fields);
        prop_assert_eq!(found(&host, &head), expected.ok_or(HostPathError::NoRule));
    }
}
