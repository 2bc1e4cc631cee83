//! Pure: `config-observability`: metrics, traces, request logs; and `config-tracing`, which it replaced.
//!
//! Keys, defaults, bounds and messages: knative/serving `pkg/observability` at 98e5ef9, knative/pkg `observability` at
//! 521cb33.

use std::time::Duration;

use common::{
    request_log::{self, Template},
    wire::RequestLog,
};

use super::{ConfigMap, go::Span, keys::Keys};

/// Where figures are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// How.
    pub protocol: Protocol,
    /// Whereto; with `prometheus` an address to listen on, or nothing.
    pub endpoint: String,
    /// How often; `None`: the exporter's own default.
    pub interval: Option<Duration>,
}

/// How metrics leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Not at all. (Every part serves `/metrics` at its own port nevertheless.)
    None,
    /// Asked for, at `/metrics`.
    Prometheus,
    /// Sent as OTLP over gRPC.
    Grpc,
    /// Sent as OTLP over HTTP.
    HttpProtobuf,
}

/// How traces leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceProtocol {
    /// Not at all.
    None,
    /// Sent as OTLP over gRPC.
    Grpc,
    /// Sent as OTLP over HTTP.
    HttpProtobuf,
    /// Written to standard output.
    Stdout,
}

/// Which requests are traced, and where traces go.
#[derive(Clone, Debug, PartialEq)]
pub struct Tracing {
    /// How.
    pub protocol: TraceProtocol,
    /// Whereto.
    pub endpoint: String,
    /// Share of requests, 0 to 1. Default 0.
    pub sampling: f64,
}

/// `config-observability`, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Observability {
    /// `metrics-*`: figures of the parts. Default none.
    pub metrics: Export,
    /// `request-metrics-*`: figures of requests. Default none.
    pub request_metrics: Export,
    /// `tracing-*`. Default none.
    pub tracing: Tracing,
    /// `runtime-profiling`. Default false.
    pub profiling: bool,
    /// `logging.enable-var-log-collection`. Default false.
    pub var_log_collection: bool,
    /// `logging.revision-url-template`, in which `${REVISION_UID}` is replaced. Default empty: no `logUrl`.
    pub log_url_template: String,
    /// `logging.enable-request-log`, `logging.request-log-template` (Knative's `httpRequest` line) and
    /// `logging.enable-probe-request-log` (false). Default none: requests are not logged.
    pub request_log: Option<RequestLog>,
}

impl Default for Observability {
    fn default() -> Self {
        let export = Export { protocol: Protocol::None, endpoint: String::new(), interval: None };
        Self {
            metrics: export.clone(),
            request_metrics: export,
            tracing: Tracing {
                protocol: TraceProtocol::None,
                endpoint: String::new(),
                sampling: 0.0,
            },
            profiling: false,
            var_log_collection: false,
            log_url_template: String::new(),
            request_log: None,
        }
    }
}

impl Observability {
    /// Whether only the activator can do what is asked, so that no connection may go direct.
    pub fn needs_activator(&self) -> bool {
        self.request_log.is_some() || self.tracing.protocol != TraceProtocol::None
    }

    /// Where the log of a Revision is found; `None`: nothing is set.
    pub fn log_url(&self, revision_uid: &str) -> Option<String> {
        let template = Some(self.log_url_template.as_str()).filter(|it| !it.is_empty());
        template.map(|it| it.replace("${REVISION_UID}", revision_uid))
    }
}

impl ConfigMap for Observability {
    const NAME: &'static str = "config-observability";

    fn read(keys: &mut Keys<'_>) -> Self {
        older(keys);
        let mut it = Self::default();
        let metrics = ["metrics-protocol", "metrics-endpoint", "metrics-export-interval"];
        export(keys, metrics, &mut it.metrics);
        let requests = [
            "request-metrics-protocol",
            "request-metrics-endpoint",
            "request-metrics-export-interval",
        ];
        export(keys, requests, &mut it.request_metrics);
        tracing(keys, &mut it.tracing);
        it.profiling = profiling(keys);
        keys.flag("logging.enable-var-log-collection", &mut it.var_log_collection);
        keys.text("logging.revision-url-template", &mut it.log_url_template);
        it.request_log = request_log(keys);
        it
    }
}

fn older(keys: &mut Keys<'_>) {
    keys.superseded(&[
        ("metrics.backend-destination", "metrics-protocol"),
        ("metrics.opencensus-address", "metrics-endpoint"),
        ("metrics.opencensus-require-tls", "metrics-endpoint"),
        ("metrics.reporting-period-seconds", "metrics-export-interval"),
        ("metrics.request-metrics-backend-destination", "request-metrics-protocol"),
        ("metrics.request-metrics-reporting-period-seconds", "request-metrics-export-interval"),
        ("metrics.allow-stackdriver-custom-metrics", "metrics-protocol"),
        ("metrics.stackdriver-project-id", "metrics-endpoint"),
        ("profiling.enable", "runtime-profiling"),
        ("logging.write-request-logs", "logging.enable-request-log"),
    ]);
}

fn export(keys: &mut Keys<'_>, [protocol, endpoint, interval]: [&'static str; 3], to: &mut Export) {
    let mut name = "none".to_owned();
    let mut every = Span::default();
    keys.text(protocol, &mut name);
    keys.text(endpoint, &mut to.endpoint);
    keys.span(interval, &mut every);
    to.protocol = match name.as_str() {
        "none" => Protocol::None,
        "prometheus" => Protocol::Prometheus,
        "grpc" => Protocol::Grpc,
        "http/protobuf" => Protocol::HttpProtobuf,
        other => return keys.wrong(format!("unsupported protocol {other:?}")),
    };
    match (to.protocol, to.endpoint.is_empty()) {
        (Protocol::Grpc | Protocol::HttpProtobuf, true) => {
            keys.wrong(format!("endpoint should be set when protocol is {name:?}"));
        }
        (Protocol::None, false) => {
            keys.wrong(format!("endpoint should not be set when protocol is {name:?}"));
        }
        (Protocol::None, true)
        | (Protocol::Grpc | Protocol::HttpProtobuf, false)
        | (Protocol::Prometheus, _) => {}
    }
    to.interval = export_interval(keys, every);
}

fn export_interval(keys: &mut Keys<'_>, every: Span) -> Option<Duration> {
    if every.0 < 0 {
        keys.wrong(format!("export interval \"{every}\" should be greater than zero"));
    }
    Some(every.duration()).filter(|it| !it.is_zero())
}

fn tracing(keys: &mut Keys<'_>, to: &mut Tracing) {
    let mut name = "none".to_owned();
    keys.text("tracing-protocol", &mut name);
    keys.text("tracing-endpoint", &mut to.endpoint);
    keys.float("tracing-sampling-rate", &mut to.sampling);
    to.protocol = match name.as_str() {
        "none" => TraceProtocol::None,
        "grpc" => TraceProtocol::Grpc,
        "http/protobuf" => TraceProtocol::HttpProtobuf,
        "stdout" => TraceProtocol::Stdout,
        other => return keys.wrong(format!("unsupported protocol {other:?}")),
    };
    match (to.protocol, to.endpoint.is_empty()) {
        (TraceProtocol::Grpc | TraceProtocol::HttpProtobuf, true) => {
            keys.wrong(format!("endpoint should be set for protocol {name:?}"));
        }
        (TraceProtocol::None | TraceProtocol::Stdout, false) => {
            keys.wrong("endpoint should not be set when protocol is 'none'");
        }
        (TraceProtocol::None | TraceProtocol::Stdout, true)
        | (TraceProtocol::Grpc | TraceProtocol::HttpProtobuf, false) => {}
    }
    let rate = to.sampling;
    if rate < 0.0 {
        keys.wrong(format!("sampling rate {rate:.6} should be greater or equal to zero"));
    } else if rate > 1.0 {
        keys.wrong(format!("sampling rate {rate:.6} should be less than or equal to one"));
    }
}

fn profiling(keys: &mut Keys<'_>) -> bool {
    let mut setting = "disabled".to_owned();
    keys.text("runtime-profiling", &mut setting);
    let go = "it is about Go's own memory figures";
    keys.without_effect(&[("runtime-export-interval", go)]);
    match setting.as_str() {
        "enabled" => true,
        "disabled" => false,
        other => {
            keys.wrong(format!("unsupported profile setting {other:?}"));
            false
        }
    }
}

/// A template that could not be carried out is refused also while nothing asks for it.
fn request_log(keys: &mut Keys<'_>) -> Option<RequestLog> {
    const ENABLE: &str = "logging.enable-request-log";
    const TEMPLATE: &str = "logging.request-log-template";
    let (mut wanted, mut probes) = (false, false);
    keys.flag(ENABLE, &mut wanted);
    keys.flag("logging.enable-probe-request-log", &mut probes);
    let source = keys.get(TEMPLATE).map_or(request_log::USUAL, str::trim);
    if source.is_empty() && wanted {
        keys.wrong(format!("{ENABLE:?} was set to true, but no {TEMPLATE:?} was specified"));
    }
    match Template::parse(source) {
        Ok(template) => {
            // Whoever writes JSON wants lines that can be read as such.
            let bare = if source.starts_with('{') { template.unescaped() } else { Vec::new() };
            for field in bare {
                keys.warn(format!("{TEMPLATE}: clients choose {field} freely: write it with js"));
            }
            wanted.then_some(RequestLog { template, probes })
        }
        Err(why) => {
            keys.wrong(format!("{TEMPLATE}: {why}"));
            None
        }
    }
}

/// `config-tracing`: nothing in it counts any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OldTracing;

impl ConfigMap for OldTracing {
    const NAME: &'static str = "config-tracing";

    fn read(keys: &mut Keys<'_>) -> Self {
        let all: Vec<_> = keys.all().map(|(key, _)| key).collect();
        for key in all {
            keys.warn(format!("key {key:?} has no effect: use config-observability"));
        }
        Self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config_maps::{Read, read},
        parse::line,
    };

    fn map(pairs: &[(&str, &str)]) -> Result<Read<Observability>, String> {
        let data = pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        read::<Observability>(&data).map_err(|it| line(&it))
    }

    #[test]
    fn every_key_is_followed() {
        assert_eq!(map(&[]).map(|it| it.value), Ok(Observability::default()));
        let want = Observability {
            metrics: Export {
                protocol: Protocol::HttpProtobuf,
                endpoint: "http://a/v1".into(),
                interval: Some(Duration::from_secs(60)),
            },
            request_metrics: Export {
                protocol: Protocol::Prometheus,
                endpoint: String::new(),
                interval: None,
            },
            tracing: Tracing {
                protocol: TraceProtocol::Grpc,
                endpoint: "b:4317".into(),
                sampling: 0.25,
            },
            profiling: true,
            var_log_collection: true,
            log_url_template: "http://log/${REVISION_UID}".into(),
            request_log: Some(RequestLog {
                template: Template::parse("{{.Request.Method}}").unwrap(),
                probes: true,
            }),
        };
        let read = map(&[
            ("metrics-protocol", "http/protobuf"),
            ("metrics-endpoint", "http://a/v1"),
            ("metrics-export-interval", "60s"),
            ("request-metrics-protocol", "prometheus"),
            ("tracing-protocol", "grpc"),
            ("tracing-endpoint", "b:4317"),
            ("tracing-sampling-rate", "0.25"),
            ("runtime-profiling", "enabled"),
            ("logging.enable-var-log-collection", "true"),
            ("logging.revision-url-template", "http://log/${REVISION_UID}"),
            ("logging.enable-request-log", "true"),
            ("logging.enable-probe-request-log", "true"),
            ("logging.request-log-template", "{{.Request.Method}}"),
        ]);
        assert_eq!(read, Ok(Read { value: want.clone(), warnings: vec![] }));
        assert_eq!(want.log_url("u-1").as_deref(), Some("http://log/u-1"));
        assert!(want.needs_activator() && !Observability::default().needs_activator());
        assert_eq!(Observability::default().log_url("u-1"), None);
    }

    #[test]
    fn every_refusal_is_in_knatives_words() {
        for (pairs, said) in [
            (&[("metrics-protocol", "carbon")][..], "unsupported protocol \"carbon\""),
            (&[("metrics-protocol", "grpc")], "endpoint should be set when protocol is \"grpc\""),
            (
                &[("request-metrics-endpoint", "x")],
                "endpoint should not be set when protocol is \"none\"",
            ),
            (
                &[("metrics-export-interval", "-1s")],
                "export interval \"-1s\" should be greater than zero",
            ),
            (&[("tracing-protocol", "zipkin")], "unsupported protocol \"zipkin\""),
            (
                &[("tracing-sampling-rate", "1.5")],
                "sampling rate 1.500000 should be less than or equal to one",
            ),
            (&[("runtime-profiling", "on")], "unsupported profile setting \"on\""),
            (
                &[("logging.enable-request-log", "true"), ("logging.request-log-template", "")],
                "\"logging.enable-request-log\" was set to true, but no \
                 \"logging.request-log-template\" was specified",
            ),
        ] {
            assert_eq!(map(pairs), Err(said.to_owned()), "{pairs:?}");
        }
    }

    #[test]
    fn request_logs_have_knatives_line_or_one_that_can_be_carried_out() {
        const TEMPLATE: &str = "logging.request-log-template";
        let on = ("logging.enable-request-log", "true");
        let source = |pairs: &[(&str, &str)]| {
            let log = map(pairs).unwrap().value.request_log;
            log.map(|log| (log.template.source().to_owned(), log.probes))
        };
        assert_eq!(source(&[on]), Some((request_log::USUAL.to_owned(), false)));
        assert_eq!(
            source(&[on, (TEMPLATE, " {{.TraceID}}\n")]),
            Some(("{{.TraceID}}".into(), false))
        );
        assert_eq!(source(&[(TEMPLATE, "{{.TraceID}}")]), None);
        for pairs in [
            &[(TEMPLATE, "a\n{{if .TraceID}}b{{end}}")][..],
            &[on, (TEMPLATE, "a\n{{if .TraceID}}b{{end}}")],
        ] {
            let said = map(pairs).unwrap_err();
            let want = "logging.request-log-template: template: requestLog:2:3: \"if\" is not supported; a template may have";
            assert!(said.starts_with(want), "{said}");
        }
        let bare = map(&[on, (TEMPLATE, r#"{"a": "{{.Request.Host}}"}"#)]).unwrap().warnings;
        assert_eq!(
            bare,
            ["logging.request-log-template: clients choose .Request.Host freely: write it with js"]
        );
    }

    #[test]
    fn keys_of_the_opencensus_era_name_their_successors() {
        let read = map(&[("metrics.backend-destination", "prometheus")]).unwrap();
        let want = "key \"metrics.backend-destination\" is of an older release and has no effect: \
                    use \"metrics-protocol\"";
        assert_eq!((read.value, read.warnings), (Observability::default(), vec![want.into()]));
    }
}
