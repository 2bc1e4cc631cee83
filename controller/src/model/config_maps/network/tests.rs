use common::wire::TlsCipher;

use super::*;
use crate::model::{
    config_maps::{ParsedConfigMap, read},
    problem::problems_line,
};

fn map(pairs: &[(&str, &str)]) -> Result<ParsedConfigMap<NetworkConfig>, String> {
    let data = pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect();
    read::<NetworkConfig>(&data).map_err(|it| problems_line(&it))
}

/// Settings of the gateway that [`every_key_is_followed`] reads.
fn expected_edge() -> EdgeSettings {
    EdgeSettings {
        trusted_proxies: ["10.0.0.0/8", "192.0.2.7/32", "fd00::/8"]
            .map(|net| net.parse().unwrap())
            .into(),
        requires_proxy_protocol: true,
        allowed_upgrades: vec!["xmpp".into(), "foo/2".into()],
        allows_underscores: true,
        certificates: Vec::new(),
        https_port: NonZeroU16::new(8443),
        hsts: HstsPolicy::parse("max-age=31536000; includeSubDomains").ok(),
        tls: TlsSettings {
            min_version: TlsMinVersion::Tls13,
            ciphers: vec![TlsCipher::Aes256GcmSha384, TlsCipher::EcdheRsaAes128GcmSha256],
        },
        is_sni_strict: true,
        tcp_idle_timeout: Some(Duration::from_secs(3600)),
        trusted_ingresses: vec!["10.244.0.0/16".parse().unwrap()],
    }
}

#[test]
fn every_key_is_followed() {
    assert_eq!(map(&[]), Ok(ParsedConfigMap { value: NetworkConfig::default(), warnings: vec![] }));
    let source = "{{.Name}}.{{.Domain}}";
    let expected = NetworkConfig {
        domain_template: Some(
            GoTemplate::parse("domain-template", source, &DOMAIN_FIELDS).unwrap(),
        ),
        tag_template: Some(
            GoTemplate::parse("tag-template", "{{.Name}}-{{.Tag}}", &TAG_FIELDS).unwrap(),
        ),
        http_protocol: HttpProtocol::Redirected,
        rollout_duration: Duration::from_secs(380),
        autocreate_claims: true,
        external_scheme: "https".into(),
        default_path: Some(ConnectionPath::Activator),
        certificates: vec!["default-tls".into(), "shop.tls".into(), "other".into()],
        external_domain_tls: true,
        cluster_local_domain_tls: true,
        certificate_class: "x.example.com".into(),
        ingress_class: "y.example.com".into(),
        wildcard_namespaces: Some(LabelSelector::default()),
        edge: expected_edge(),
        gateway_ports: PortRanges::parse(["5432", "6000-6100"]).unwrap(),
    };
    let read = map(&[
        ("rouse.dev.trusted-proxies", "10.1.2.3/8, 192.0.2.7,\nfd00::/8"),
        ("rouse.dev.proxy-protocol", "true"),
        ("rouse.dev.upgrades", "XMPP,foo/2"),
        ("rouse.dev.underscores-in-headers", "true"),
        ("rouse.dev.certificates", "default-tls, shop.tls\nother,"),
        ("rouse.dev.https-port", " 8443 "),
        ("rouse.dev.hsts", " max-age=31536000; includeSubDomains "),
        ("rouse.dev.tls-min-version", "1.3"),
        ("rouse.dev.tls-ciphers", "TLS_AES_256_GCM_SHA384, TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"),
        ("rouse.dev.tls-strict-sni", "true"),
        ("rouse.dev.tcp-idle-timeout", " 1h "),
        ("rouse.dev.gateway-ports", "5432, 6000-6100"),
        ("external-domain-tls", "Enabled"),
        ("cluster-local-domain-tls", "Enabled"),
        ("certificate-class", "x.example.com"),
        ("ingress-class", "y.example.com"),
        ("rouse.dev.trusted-ingresses", "10.244.1.2/16"),
        ("namespace-wildcard-cert-selector", "{}"),
        ("domain-template", source),
        ("tag-template", "{{.Name}}-{{.Tag}}"),
        ("http-protocol", "Redirected"),
        ("rollout-duration", "380"),
        ("autocreate-cluster-domain-claims", "true"),
        ("default-external-scheme", "https"),
        ("rouse.dev.path", "activator"),
    ]);
    assert_eq!(read, Ok(ParsedConfigMap { value: expected, warnings: vec![] }));
}

#[test]
fn another_ingress_must_be_trusted_and_that_of_rouse_need_not() {
    let read = |pairs: &[(&str, &str)]| {
        let read = map(pairs).unwrap();
        (read.value.ingress_class, read.warnings)
    };
    for own in ["", OWN_INGRESS_CLASS] {
        assert_eq!(read(&[("ingress-class", own)]), (OWN_INGRESS_CLASS.into(), vec![]));
    }
    let (class, warnings) = read(&[("ingress-class", "y.example.com")]);
    assert_eq!(class, "y.example.com");
    assert!(warnings[0].contains("has no effect"), "{warnings:?}");
    let error = map(&[("rouse.dev.trusted-ingresses", "kourier")]).unwrap_err();
    assert_eq!(error, "rouse.dev.trusted-ingresses has \"kourier\", must be ADDRESS/LENGTH");
}

#[test]
fn ports_and_the_idle_deadline_of_raw_tcp_have_bounds() {
    let idle = |text| map(&[("rouse.dev.tcp-idle-timeout", text)]);
    for off in ["", "0", "0s"] {
        assert_eq!(idle(off).unwrap().value, NetworkConfig::default(), "{off:?}");
    }
    for bad in ["-1s", "999ms", "5", "soon"] {
        let error = idle(bad).unwrap_err();
        assert!(error.contains("must be 0, or 1s or more"), "{error}");
    }
    let error = map(&[("rouse.dev.gateway-ports", "5432,70000")]).unwrap_err();
    assert!(error.contains("rouse.dev.gateway-ports has \"70000\""), "{error}");
}

#[test]
fn keys_of_older_releases_name_their_successors() {
    let read = map(&[
        ("autoTLS", "enabled"),
        ("httpProtocol", "redirected"),
        ("internal-encryption", "true"),
        ("dataplane-trust", "mutual"),
    ]);
    let read = read.unwrap();
    let expected = NetworkConfig {
        http_protocol: HttpProtocol::Redirected,
        external_domain_tls: true,
        ..NetworkConfig::default()
    };
    assert_eq!(read.value, expected);
    for (old, new) in [
        ("autoTLS", "external-domain-tls"),
        ("httpProtocol", "http-protocol"),
        ("internal-encryption", "system-internal-tls"),
        ("dataplane-trust", "system-internal-tls"),
    ] {
        let is_named = |it: &String| it.contains(old) && it.contains(new);
        assert!(read.warnings.iter().any(is_named), "{old}: {:?}", read.warnings);
    }
}

#[test]
fn every_refusal_names_key_and_value() {
    for (pair, expected) in [
        (("rollout-duration", "-1"), "rollout-duration must be a positive integer, but was -1"),
        (
            ("rollout-duration", "5s"),
            "failed to parse \"rollout-duration\": strconv.ParseInt: parsing \"5s\": invalid syntax",
        ),
        (("http-protocol", "foo"), "httpProtocol foo in config-network ConfigMap is not supported"),
        (
            ("system-internal-tls", "wrong"),
            "system-internal-tls with value: \"wrong\" in config-network ConfigMap is not supported",
        ),
        (
            ("cluster-local-domain-tls", "wrong"),
            "cluster-local-domain-tls with value: \"wrong\" in config-network ConfigMap is not supported",
        ),
        (("domain-template", ""), "empty hostname"),
        (("domain-template", "{{.Name}}/{{.Namespace}}"), "domain template has url path: /bar"),
        (
            ("domain-template", "{{.Annotations.sub}}.{{.Domain}}"),
            "domain template gives \"<no value>.baz.com\": '<' in host name",
        ),
        (
            ("tag-template", "{{.Namespace}}"),
            "template: tag-template: can't evaluate field Namespace: there are .Name, .Tag",
        ),
        (
            ("rouse.dev.path", "wire"),
            "rouse.dev.path = \"wire\", must be \"direct\" or \"activator\"",
        ),
        (
            ("rouse.dev.trusted-proxies", "10.0.0.0/8, lb.example"),
            "rouse.dev.trusted-proxies has \"lb.example\", must be ADDRESS/LENGTH",
        ),
        (
            ("rouse.dev.proxy-protocol", "true"),
            "rouse.dev.proxy-protocol needs rouse.dev.trusted-proxies: the header is read from no other peers",
        ),
        (
            ("rouse.dev.upgrades", "xmpp,h2c"),
            "rouse.dev.upgrades has \"h2c\", must be protocols to switch to, and never HTTP",
        ),
    ] {
        assert_eq!(map(&[pair]), Err(expected.to_owned()), "{pair:?}");
    }
}

#[test]
fn every_refusal_of_a_tls_setting_names_key_and_value() {
    for (pair, expected) in [
        (
            ("rouse.dev.certificates", "default-tls,Shop"),
            "rouse.dev.certificates has \"Shop\", must be names of Secrets",
        ),
        (
            ("rouse.dev.certificates", "default-tls shop default-tls"),
            "rouse.dev.certificates has \"default-tls\" twice",
        ),
        (("rouse.dev.https-port", "0"), "rouse.dev.https-port = \"0\", must be 1 to 65535"),
        (("rouse.dev.https-port", "65536"), "rouse.dev.https-port = \"65536\", must be 1 to 65535"),
        (("rouse.dev.https-port", "+443"), "rouse.dev.https-port = \"+443\", must be 1 to 65535"),
        (("rouse.dev.https-port", "https"), "rouse.dev.https-port = \"https\", must be 1 to 65535"),
        (
            ("rouse.dev.hsts", "includeSubDomains"),
            "rouse.dev.hsts = \"includeSubDomains\": max-age is missing",
        ),
        (
            ("rouse.dev.tls-min-version", "1.1"),
            "rouse.dev.tls-min-version = \"1.1\", must be 1.2 or 1.3",
        ),
        (
            ("rouse.dev.tls-ciphers", "TLS_AES_128_GCM_SHA256,TLS_AES_128_GCM_SHA256"),
            "rouse.dev.tls-ciphers has \"TLS_AES_128_GCM_SHA256\" twice",
        ),
        (
            ("rouse.dev.tls-ciphers", "TLS_AES_128_GCM_SHA256,RC4"),
            "rouse.dev.tls-ciphers has \"RC4\", must be of TLS_AES_256_GCM_SHA384, TLS_AES_128_GCM_SHA256, \
             TLS_CHACHA20_POLY1305_SHA256, TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, \
             TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, \
             TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384, TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, \
             TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
        ),
    ] {
        assert_eq!(map(&[pair]), Err(expected.to_owned()), "{pair:?}");
    }
}

#[test]
fn values_that_ask_for_nothing_get_no_warning() {
    let pairs = [
        ("external-domain-tls", "Disabled"),
        ("cluster-local-domain-tls", "disabled"),
        ("system-internal-tls", ""),
        ("namespace-wildcard-cert-selector", ""),
        ("enable-mesh-pod-addressability", "false"),
        ("mesh-compatibility-mode", "Disabled"),
        ("rouse.dev.certificates", ""),
        ("rouse.dev.https-port", ""),
        ("rouse.dev.hsts", ""),
        ("rouse.dev.tls-min-version", "1.2"),
        ("rouse.dev.tls-ciphers", ""),
        ("rouse.dev.tls-strict-sni", "false"),
    ];
    assert_eq!(
        map(&pairs),
        Ok(ParsedConfigMap { value: NetworkConfig::default(), warnings: vec![] })
    );
}

/// No sidecar could end TLS in a pod, so the setting must not look as if requests were encrypted up to there.
#[test]
fn tls_between_components_gets_a_warning_that_names_what_is_encrypted() {
    let read = map(&[("system-internal-tls", "Enabled")]).unwrap();
    let expected = format!("key \"system-internal-tls\" has no effect: {NO_SYSTEM_TLS}");
    assert_eq!((read.value, read.warnings), (NetworkConfig::default(), vec![expected]));
}

#[test]
fn the_selector_of_namespaces_with_one_certificate_is_applied() {
    let labels = |text: &str| BTreeMap::from([("team".to_owned(), text.to_owned())]);
    let has = |selector: &str, team: &str| {
        let read = map(&[("namespace-wildcard-cert-selector", selector)]).unwrap();
        read.value.has_wildcard_certificate(&labels(team))
    };
    assert!(has("{}", "a") && !has("", "a"));
    let one = "matchLabels:\n  team: a\n";
    assert!(has(one, "a") && !has(one, "b"));
    let none_of = "matchExpressions:\n- {key: team, operator: NotIn, values: [a]}\n";
    assert!(!has(none_of, "a") && has(none_of, "b"));
}

#[test]
fn trust_in_every_client_gets_a_warning() {
    for key in ["rouse.dev.trusted-proxies", "rouse.dev.trusted-ingresses"] {
        for (network, expected) in [("0.0.0.0/0", 1), ("::/0", 1), ("10.0.0.0/8", 0)] {
            let read = map(&[(key, network)]).unwrap();
            let warnings = read.warnings.iter();
            let count = warnings.filter(|it| it.contains("trusts every client")).count();
            assert_eq!(count, expected, "{key} {network} {read:?}");
        }
    }
}

#[test]
fn ciphers_of_tls_1_2_alone_get_a_warning_and_none_of_1_3_an_error() {
    let ciphers = ("rouse.dev.tls-ciphers", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256");
    let read = map(&[ciphers]).unwrap();
    assert_eq!(read.value.edge.tls.ciphers, [TlsCipher::EcdheRsaAes128GcmSha256]);
    let expected = "rouse.dev.tls-ciphers has no cipher of TLS 1.3: clients get TLS 1.2";
    assert_eq!(read.warnings, [expected]);
    let error = map(&[ciphers, ("rouse.dev.tls-min-version", "1.3")]).unwrap_err();
    let expected =
        "rouse.dev.tls-ciphers has no cipher of TLS 1.3, the only version that is accepted";
    assert!(error.starts_with(expected), "{error}");
}
