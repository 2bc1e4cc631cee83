//! Pure: path rules and wildcards of hosts on the wire, and how an earlier release reads them.

use super::*;

fn domain(host: &str, path_rule: Option<PathRule>) -> MappedDomain {
    MappedDomain { path_rule, ..fixtures::mapped_domain(host) }
}

fn rule(prefix: &str, strips_prefix: bool) -> Option<PathRule> {
    Some(PathRule { prefix: PathPrefix::parse(prefix).expect("a prefix"), strips_prefix })
}

/// An earlier release would serve all paths of such a host by one of its rules.
#[test]
fn a_host_with_path_rules_is_not_where_an_earlier_release_looks() {
    let open = domain("open.example", None);
    let guarded = MappedDomain {
        client_auth: Some(ClientAuth { ca: None, is_optional: false }),
        ..domain("a.example", rule("/guarded", false))
    };
    let ruled =
        [domain("a.example", rule("/", false)), guarded, domain("*.b.example", rule("/v1", true))];
    let mut all = vec![open];
    all.extend(ruled);
    let sent = GatewayRules { mapped_domains: all, ..GatewayRules::default() };
    let message = raw::Ingress::from(sent.clone());
    let earlier: Vec<&str> =
        message.domains.iter().chain(&message.guarded_domains).map(|it| it.host.as_str()).collect();
    assert_eq!(earlier, ["open.example"]);
    assert_eq!(GatewayRules::try_from(message), Ok(sent));
}

#[test]
fn a_path_prefix_that_no_controller_sends_is_refused() {
    let ruled = |path_prefix: &str| raw::Domain {
        host: "a.example".into(),
        path_prefix: path_prefix.into(),
        ..raw::Domain::default()
    };
    let message = raw::Ingress { ruled_domains: vec![ruled("a")], ..raw::Ingress::default() };
    let error = GatewayRules::try_from(message).expect_err("no prefix");
    assert_eq!(error.to_string(), "field domain.path_prefix is \"a\": must be a path prefix");
    let message = raw::Ingress { domains: vec![ruled("/a")], ..raw::Ingress::default() };
    let error = GatewayRules::try_from(message).expect_err("all paths would be served");
    let expected = "field domain.path_prefix is \"/a\": must be empty outside of ruled_domains";
    assert_eq!(error.to_string(), expected);
}
