//! Pure: `config-observability`: request logs and URLs of logs; and `config-tracing`, which it replaced.
//!
//! Metrics are served at `/metrics` and not exported; there are no traces. Values that Knative refuses are refused all
//! the same.
//!
//! Keys, defaults, bounds and messages: knative/serving `pkg/observability` at 98e5ef9, knative/pkg `observability` at
//! 521cb33.

use common::{
    request_log::{self, LogTemplate},
    wire::RequestLogSettings,
};

use super::{ConfigMapSettings, keys::ConfigMapReader, network::FALSE_TEXTS};
use crate::model::go_values::GoDuration;

/// `config-observability`, checked against its bounds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservabilityConfig {
    /// `logging.revision-url-template`, in which `${REVISION_UID}` is replaced. Default empty: no `logUrl`.
    pub log_url_template: String,
    /// Request log: `logging.enable-request-log`, `logging.request-log-template` (default Knative's `httpRequest` line)
    /// and `logging.enable-probe-request-log` (default false). Default none: requests are not logged.
    pub request_log: Option<RequestLogSettings>,
}

impl ObservabilityConfig {
    /// Returns true if only activators can do what is set, so that no connection may take the direct path.
    pub fn needs_activator(&self) -> bool {
        self.request_log.is_some()
    }

    /// URL of a Revision's log; `None` if no template is set.
    pub fn log_url(&self, revision_uid: &str) -> Option<String> {
        let template = Some(self.log_url_template.as_str()).filter(|it| !it.is_empty());
        template.map(|it| it.replace("${REVISION_UID}", revision_uid))
    }
}

impl ConfigMapSettings for ObservabilityConfig {
    const NAME: &'static str = "config-observability";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        accept_older_keys(keys);
        let mut it = Self::default();
        check_metrics_export(
            keys,
            ["metrics-protocol", "metrics-endpoint", "metrics-export-interval"],
        );
        check_metrics_export(
            keys,
            [
                "request-metrics-protocol",
                "request-metrics-endpoint",
                "request-metrics-export-interval",
            ],
        );
        check_tracing(keys);
        check_profiling(keys);
        check_var_log(keys);
        keys.read_text("logging.revision-url-template", &mut it.log_url_template);
        it.request_log = read_request_log(keys);
        it
    }
}

fn accept_older_keys(keys: &mut ConfigMapReader<'_>) {
    keys.accept_superseded(&[
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

/// Reads the settings of one metrics export, none of which has an effect.
fn check_metrics_export(
    keys: &mut ConfigMapReader<'_>,
    [protocol, endpoint, interval]: [&'static str; 3],
) {
    const WHY: &str = "figures are asked for at /metrics, and sent nowhere";
    let (mut name, mut to, mut every) = ("none".to_owned(), String::new(), GoDuration::default());
    keys.read_text(protocol, &mut name);
    keys.read_text(endpoint, &mut to);
    keys.read_duration(interval, &mut every);
    // As in Knative, an endpoint is needed exactly where the protocol sends to one.
    match (name.as_str(), to.is_empty()) {
        ("grpc" | "http/protobuf", true) => {
            keys.add_error(format!("endpoint should be set when protocol is {name:?}"));
        }
        ("none", false) => {
            keys.add_error(format!("endpoint should not be set when protocol is {name:?}"));
        }
        ("none", true) | ("grpc" | "http/protobuf", false) | ("prometheus", _) => {}
        (other, _) => keys.add_error(format!("unsupported protocol {other:?}")),
    }
    check_export_interval(keys, every);
    // Valid values have no effect either, so each one that asks for an export gets a warning.
    keys.warn_unless_usual(protocol, &["none", "prometheus"], WHY);
    keys.warn_unless_usual(endpoint, &[], WHY);
    keys.warn_unless_usual(interval, &[], WHY);
}

/// Refuses a negative export interval. 0 is Knative's value for a default of the exporter.
fn check_export_interval(keys: &mut ConfigMapReader<'_>, interval: GoDuration) {
    if interval.0 < 0 {
        keys.add_error(format!("export interval \"{interval}\" should be greater than zero"));
    }
}

fn check_tracing(keys: &mut ConfigMapReader<'_>) {
    const WHY: &str = "there are no traces";
    let (mut name, mut to, mut rate) = ("none".to_owned(), String::new(), 0.0);
    keys.read_text("tracing-protocol", &mut name);
    keys.read_text("tracing-endpoint", &mut to);
    keys.read_float("tracing-sampling-rate", &mut rate);
    // As in Knative, an endpoint is needed exactly where the protocol sends to one.
    match (name.as_str(), to.is_empty()) {
        ("grpc" | "http/protobuf", true) => {
            keys.add_error(format!("endpoint should be set for protocol {name:?}"));
        }
        ("none" | "stdout", false) => {
            keys.add_error("endpoint should not be set when protocol is 'none'");
        }
        ("none" | "stdout", true) | ("grpc" | "http/protobuf", false) => {}
        (other, _) => keys.add_error(format!("unsupported protocol {other:?}")),
    }
    keys.warn_unless_usual("tracing-protocol", &["none"], WHY);
    keys.warn_unless_usual("tracing-endpoint", &[], WHY);
    keys.warn_unless_usual("tracing-sampling-rate", &["0", "0.0"], WHY);
    if rate < 0.0 {
        keys.add_error(format!("sampling rate {rate:.6} should be greater or equal to zero"));
    } else if rate > 1.0 {
        keys.add_error(format!("sampling rate {rate:.6} should be less than or equal to one"));
    }
}

fn check_profiling(keys: &mut ConfigMapReader<'_>) {
    const INTERVAL: &str = "runtime-export-interval";
    let (mut setting, mut every) = ("disabled".to_owned(), GoDuration::default());
    keys.read_text("runtime-profiling", &mut setting);
    keys.read_duration(INTERVAL, &mut every);
    check_export_interval(keys, every);
    keys.accept_without_effect(&[(INTERVAL, "it is about Go's own memory figures")]);
    if !["enabled", "disabled"].contains(&setting.as_str()) {
        keys.add_error(format!("unsupported profile setting {setting:?}"));
    }
    keys.warn_unless_usual("runtime-profiling", &["disabled"], "no component serves a profiler");
}

fn check_var_log(keys: &mut ConfigMapReader<'_>) {
    let (key, mut is_enabled) = ("logging.enable-var-log-collection", false);
    keys.read_bool(key, &mut is_enabled);
    keys.warn_unless_usual(
        key,
        &FALSE_TEXTS,
        "what a container writes to its standard output is collected",
    );
}

/// Reads the request log. A template that cannot run is refused even while request logs are off.
fn read_request_log(keys: &mut ConfigMapReader<'_>) -> Option<RequestLogSettings> {
    const ENABLE: &str = "logging.enable-request-log";
    const TEMPLATE: &str = "logging.request-log-template";
    const PROBES: &str = "logging.enable-probe-request-log";
    let (mut is_enabled, mut probes) = (false, false);
    keys.read_bool(ENABLE, &mut is_enabled);
    keys.read_bool(PROBES, &mut probes);
    if probes && !is_enabled {
        keys.add_warning(format!("{PROBES} has no effect: {ENABLE} is off"));
    }
    let source = keys.get(TEMPLATE).map_or(request_log::DEFAULT_TEMPLATE, str::trim);
    if source.is_empty() && is_enabled {
        keys.add_error(format!("{ENABLE:?} was set to true, but no {TEMPLATE:?} was specified"));
    }
    match LogTemplate::parse(source) {
        Ok(template) => {
            // A template that begins with `{` is meant to be JSON, which unescaped text of clients would break.
            let bare =
                if source.starts_with('{') { template.unescaped_values() } else { Vec::new() };
            for field in bare {
                keys.add_warning(format!(
                    "{TEMPLATE}: clients choose {field} freely: write it with js"
                ));
            }
            is_enabled.then_some(RequestLogSettings { template, logs_probes: probes })
        }
        Err(error) => {
            keys.add_error(format!("{TEMPLATE}: {error}"));
            None
        }
    }
}

/// `config-tracing`, in which no key has an effect any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TracingConfig;

impl ConfigMapSettings for TracingConfig {
    const NAME: &'static str = "config-tracing";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        let all: Vec<_> = keys.all_keys().map(|(key, _)| key).collect();
        for key in all {
            keys.add_warning(format!("key {key:?} has no effect: use config-observability"));
        }
        Self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        config_maps::{ParsedConfigMap, read},
        problem::problems_line,
    };

    fn map(pairs: &[(&str, &str)]) -> Result<ParsedConfigMap<ObservabilityConfig>, String> {
        let data = pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        read::<ObservabilityConfig>(&data).map_err(|it| problems_line(&it))
    }

    #[test]
    fn every_key_is_followed() {
        assert_eq!(map(&[]).map(|it| it.value), Ok(ObservabilityConfig::default()));
        let expected = ObservabilityConfig {
            log_url_template: "http://log/${REVISION_UID}".into(),
            request_log: Some(RequestLogSettings {
                template: LogTemplate::parse("{{.Request.Method}}").unwrap(),
                logs_probes: true,
            }),
        };
        let read = map(&[
            ("metrics-protocol", "none"),
            ("request-metrics-protocol", "prometheus"),
            ("tracing-protocol", "none"),
            ("tracing-sampling-rate", "0"),
            ("runtime-profiling", "disabled"),
            ("logging.enable-var-log-collection", "false"),
            ("logging.revision-url-template", "http://log/${REVISION_UID}"),
            ("logging.enable-request-log", "true"),
            ("logging.enable-probe-request-log", "true"),
            ("logging.request-log-template", "{{.Request.Method}}"),
        ]);
        assert_eq!(read, Ok(ParsedConfigMap { value: expected.clone(), warnings: vec![] }));
        assert_eq!(expected.log_url("u-1").as_deref(), Some("http://log/u-1"));
        assert!(expected.needs_activator() && !ObservabilityConfig::default().needs_activator());
        assert_eq!(ObservabilityConfig::default().log_url("u-1"), None);
    }

    #[test]
    fn each_setting_without_effect_gets_a_warning() {
        let read = map(&[
            ("metrics-protocol", "http/protobuf"),
            ("metrics-endpoint", "http://a/v1"),
            ("metrics-export-interval", "60s"),
            ("tracing-protocol", "grpc"),
            ("tracing-endpoint", "b:4317"),
            ("tracing-sampling-rate", "0.25"),
            ("runtime-profiling", "enabled"),
            ("logging.enable-var-log-collection", "true"),
        ]);
        let read = read.unwrap();
        assert_eq!(read.value, ObservabilityConfig::default());
        assert_eq!(read.warnings.len(), 8, "{:?}", read.warnings);
    }

    #[test]
    fn every_refusal_is_in_knatives_words() {
        for (pairs, expected) in [
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
                &[("runtime-export-interval", "-1s")],
                "export interval \"-1s\" should be greater than zero",
            ),
            (
                &[("runtime-export-interval", "often")],
                "failed to parse \"runtime-export-interval\": time: invalid duration \"often\"",
            ),
            (
                &[("logging.enable-request-log", "true"), ("logging.request-log-template", "")],
                "\"logging.enable-request-log\" was set to true, but no \
                 \"logging.request-log-template\" was specified",
            ),
        ] {
            assert_eq!(map(pairs), Err(expected.to_owned()), "{pairs:?}");
        }
    }

    #[test]
    fn request_logs_have_knatives_template_or_a_supported_one() {
        const TEMPLATE: &str = "logging.request-log-template";
        let enabled = ("logging.enable-request-log", "true");
        let source = |pairs: &[(&str, &str)]| {
            let log = map(pairs).unwrap().value.request_log;
            log.map(|log| (log.template.source().to_owned(), log.logs_probes))
        };
        assert_eq!(source(&[enabled]), Some((request_log::DEFAULT_TEMPLATE.to_owned(), false)));
        assert_eq!(
            source(&[enabled, (TEMPLATE, " {{.TraceID}}\n")]),
            Some(("{{.TraceID}}".into(), false))
        );
        assert_eq!(source(&[(TEMPLATE, "{{.TraceID}}")]), None);
        for pairs in [
            &[(TEMPLATE, "a\n{{if .TraceID}}b{{end}}")][..],
            &[enabled, (TEMPLATE, "a\n{{if .TraceID}}b{{end}}")],
        ] {
            let problems = map(pairs).unwrap_err();
            let expected = "logging.request-log-template: template: requestLog:2:3: \"if\" is not supported; a template may have";
            assert!(problems.starts_with(expected), "{problems}");
        }
        let bare = map(&[enabled, (TEMPLATE, r#"{"a": "{{.Request.Host}}"}"#)]).unwrap().warnings;
        assert_eq!(
            bare,
            ["logging.request-log-template: clients choose .Request.Host freely: write it with js"]
        );
    }

    #[test]
    fn keys_of_the_opencensus_era_name_their_successors() {
        let read = map(&[("metrics.backend-destination", "prometheus")]).unwrap();
        let expected = "key \"metrics.backend-destination\" is of an older release and has no effect: \
                    use \"metrics-protocol\"";
        assert_eq!(
            (read.value, read.warnings),
            (ObservabilityConfig::default(), vec![expected.into()])
        );
    }
}
