//! Pure: Go's `text/template` over the few values that a setting may use.

use std::{collections::BTreeMap, fmt, sync::Arc};

use gotmpl::{MissingKey, TemplateError, Value};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

mod actions;
mod check;

/// A template that was parsed without error.
#[derive(Clone)]
pub struct GoTemplate {
    source: Arc<str>,
    parsed: Arc<gotmpl::Template>,
}

impl GoTemplate {
    /// Longest template in bytes: a host name has at most 253, and nested parentheses cost stack.
    const MAX_BYTES: usize = 4096;

    /// Parses a template. `name` identifies it in errors, `fields` are the fields it may use.
    pub fn parse(name: &str, source: &str, fields: &[&str]) -> Result<Self, String> {
        if source.len() > Self::MAX_BYTES {
            return Err(format!("template {name} is longer than {} bytes", Self::MAX_BYTES));
        }
        // Checked first, since gotmpl accepts more than Go does.
        check::check_template(name, source, fields)?;
        let parsed = gotmpl::Template::new(name)
            .missing_key(MissingKey::Invalid)
            // A Go `map[string]string` yields "" for a missing key; only a field of one reads as `<no value>`.
            .func("index", |args: &[Value]| go_index(args))
            .parse(source)
            .map_err(|wrong| wrong.to_string())?;
        Ok(Self { source: source.into(), parsed: Arc::new(parsed) })
    }

    /// Text of the template as written.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders the template with these values.
    pub fn render(&self, values: &TemplateValues) -> Result<String, String> {
        let data = Value::Map(Arc::new(values.0.clone()));
        self.parsed.execute_to_string(&data).map_err(|wrong| wrong.to_string())
    }
}

/// Go's `index`, which returns an empty string for a missing key.
fn go_index(args: &[Value]) -> Result<Value, TemplateError> {
    let (first, rest) = args.split_first().ok_or_else(|| {
        TemplateError::Exec("wrong number of args for index: want at least 1".into())
    })?;
    let mut value = first.clone();
    for key in rest {
        value = match value {
            // A further key below a missing one is missing too, and no error.
            Value::Nil => Value::Nil,
            value => value.index(key)?,
        };
    }
    Ok(if matches!(value, Value::Nil) { Value::String("".into()) } else { value })
}

impl fmt::Debug for GoTemplate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("GoTemplate").field(&self.source).finish()
    }
}

impl PartialEq for GoTemplate {
    fn eq(&self, other: &Self) -> bool {
        self.source == other.source
    }
}

/// Values that a template may use, by field name.
#[derive(Clone, Debug, Default)]
pub struct TemplateValues(BTreeMap<Arc<str>, Value>);

impl TemplateValues {
    /// The field names that [`from_metadata`](Self::from_metadata) sets.
    pub const METADATA_FIELDS: [&str; 6] =
        ["Name", "GenerateName", "Namespace", "UID", "Labels", "Annotations"];

    /// Adds a text under this name.
    #[must_use]
    pub fn with_text(mut self, name: &str, text: &str) -> Self {
        self.0.insert(name.into(), Value::String(text.into()));
        self
    }

    /// Adds a map under this name.
    #[must_use]
    pub fn with_map<'a>(
        mut self,
        name: &str,
        pairs: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Self {
        let pairs = pairs.into_iter();
        let map = pairs.map(|(key, text)| (Arc::from(key), Value::String(text.into()))).collect();
        self.0.insert(name.into(), Value::Map(Arc::new(map)));
        self
    }

    /// Fields of an object's metadata that are texts or maps of texts.
    pub fn from_metadata(meta: &ObjectMeta) -> Self {
        fn text(it: Option<&String>) -> &str {
            it.map_or("", String::as_str)
        }
        fn pairs(it: Option<&BTreeMap<String, String>>) -> impl Iterator<Item = (&str, &str)> {
            it.into_iter().flatten().map(|(key, text)| (key.as_str(), text.as_str()))
        }
        Self::default()
            .with_text("Name", text(meta.name.as_ref()))
            .with_text("GenerateName", text(meta.generate_name.as_ref()))
            .with_text("Namespace", text(meta.namespace.as_ref()))
            .with_text("UID", text(meta.uid.as_ref()))
            .with_map("Labels", pairs(meta.labels.as_ref()))
            .with_map("Annotations", pairs(meta.annotations.as_ref()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: [&str; 5] = ["Name", "Namespace", "Domain", "Labels", "Annotations"];

    fn values() -> TemplateValues {
        let values =
            TemplateValues::default().with_text("Name", "shop").with_text("Namespace", "team");
        values
            .with_text("Domain", "example.com")
            .with_map("Labels", [("tier", "gold")])
            .with_map("Annotations", [])
    }

    fn render(source: &str) -> Result<String, String> {
        GoTemplate::parse("t", source, &FIELDS).and_then(|it| it.render(&values()))
    }

    #[test]
    fn common_templates_render_as_in_go() {
        for (source, expected) in [
            ("{{.Name}}.{{.Namespace}}.{{.Domain}}", "shop.team.example.com"),
            ("{{.Name}}-{{.Namespace}}.{{ .Domain }}", "shop-team.example.com"),
            (r#"{{index .Labels "tier"}}.{{.Domain}}"#, "gold.example.com"),
            (r#"{{index .Labels "none"}}x"#, "x"),
            (r#"{{if index .Annotations "sub"}}a{{else}}b{{end}}"#, "b"),
            (r#"{{if eq .Namespace "team"}}{{.Name}}{{else}}no{{end}}"#, "shop"),
            (r#"{{if ne .Namespace "team"}}a{{else if .Name}}b{{end}}"#, "b"),
            (r#"{{printf "%s-%s" .Name .Namespace | printf "%.6s"}}"#, "shop-t"),
            ("{{with .Labels}}{{.tier}}{{end}}", "gold"),
            ("{{range $k, $v := .Labels}}{{$k}}{{$.Name}}{{end}}", "tiershop"),
            (r#"{{define "x"}}{{.}}!{{end}}{{template "x" .Name}}"#, "shop!"),
            (r#"{{define "x"}}{{$.tier}}{{end}}{{template "x" .Labels}}"#, "gold"),
            ("{{ .Annotations.sub }}", "<no value>"),
            ("{{- .Name -}} ", "shop"),
            ("plain", "plain"),
            ("", ""),
        ] {
            assert_eq!(render(source).as_deref(), Ok(expected), "{source}");
        }
    }

    #[test]
    fn templates_that_go_refuses_are_refused_before_they_run() {
        for source in [
            "{{",
            "{{.Name",
            "{{if}}{{end}}",
            "{{end}}",
            "{{.Name}}{{end}}.rest",
            "{{if .Name}}never closed",
            "{{if .Name}}{{else}}{{if .Name}}{{end}}",
            "{{else}}",
            r#"{{template "none"}}"#,
            "\u{1}",
        ] {
            assert!(GoTemplate::parse("t", source, &FIELDS).is_err(), "{source}");
        }
        let say = |source| GoTemplate::parse("t", source, &FIELDS).map(|_template| ()).unwrap_err();
        let untaken = say("{{if eq .Name \"\"}}{{lower .Name}}{{end}}");
        assert_eq!(untaken, r#"template: t: function "lower" not defined"#);
        let field_names = ".Name, .Namespace, .Domain, .Labels, .Annotations";
        for source in ["{{.Nmae}}", "{{if .Nmae}}{{end}}", "{{range .Labels}}{{$.Nmae}}{{end}}"] {
            let expected =
                format!("template: t: can't evaluate field Nmae: there are {field_names}");
            assert_eq!(say(source), expected);
        }
    }

    /// Templates that Go 1.26 refuses.
    const REFUSED: [&str; 60] = [
        "{{.Labels.5}}",
        "{{0x1f.A}}",
        "{{0o18}}",
        "{{0b1.1}}",
        "{{ /* a */ }}",
        "{{/* a */ }}",
        "{{-  /* a */ -}}",
        "{{- /* a */  -}}",
        r#"{{print .Name"x"}}"#,
        r#"{{js"x"}}"#,
        "{{js(.Name)}}",
        "{{(.Name)(.Name)}}",
        r#"{{print "a""b"}}"#,
        r#"{{print "a".Name}}"#,
        "{{..Name}}",
        "{{.Name.}}",
        "{{$x}}",
        "{{break}}",
        "{{range .Labels}}{{else}}{{break}}{{end}}",
        r#"{{range .Labels}}{{block "b" .}}{{continue}}{{end}}{{end}}"#,
        r#"{{range .Labels}}{{define "d"}}{{end}}{{end}}"#,
        r#"{{define "x"}}{{define "y"}}{{end}}{{end}}"#,
        "{{.Name | 1}}",
        r#"{{.Name | "x"}}"#,
        "{{.Name | .}}",
        "{{.Name | nil}}",
        "{{.Name | true}}",
        "{{if .Name}}a{{else with .Name}}b{{end}}",
        "{{with .Name}}a{{else if .Name}}b{{end}}",
        "{{range .Labels}}a{{else if .}}b{{end}}",
        r#"{{block "x"}}a{{end}}"#,
        r#"{{define "x"}}a{{end}}{{define "x"}}b{{end}}"#,
        r#"{{define "t"}}a{{end}}b"#,
        "{{range $x $y := .Labels}}{{end}}",
        "{{range $x, := .Labels}}{{end}}",
        "{{range $x, $y := .Labels}}{{end}}{{$y}}",
        "{{if .Name}}{{$x := 1}}{{end}}{{$x}}",
        r#"{{define "x"}}{{$y}}{{end}}{{$y := 1}}"#,
        "{{$x := 1}}{{$x=2}}",
        "{{08}}",
        "{{1__0}}",
        "{{1_}}",
        "{{1.5_}}",
        "{{0x1_}}",
        "{{1e400}}",
        r"{{'\q'}}",
        "{{''}}",
        "{{\"a\nb\"}}",
        r#"{{"\q"}}"#,
        r#"{{"\'"}}"#,
        "{{\u{a0}.Name}}",
        "{{.Name\u{a0}}}",
        "{{1.2.3}}",
        "{{1a}}",
        "{{1.A}}",
        "{{true.A}}",
        "{{nil.A}}",
        "{{print 1-2}}",
        r#"{{if"x"}}{{end}}"#,
        "{{define`x`}}{{end}}",
    ];

    /// Templates that Go accepts, although they fail whenever they run.
    const NEVER_RUNS: [&str; 4] = [
        "{{js.Name}}",
        "{{$x = 1}}",
        "{{$x := $x}}",
        "{{if .Name}}{{$x := 1}}{{else}}{{$x}}{{end}}",
    ];

    /// Templates that Go accepts.
    const ACCEPTED: [&str; 29] = [
        "{{/* a */}}",
        "{{- /* a */ -}}",
        "{{/**/}}",
        "{{(.Name)|js}}",
        "{{.Name|js|html}}",
        "{{range .Labels}}{{if .}}{{continue}}{{end}}{{end}}",
        "{{range .Labels}}{{break}}{{end}}",
        "{{.Name | (js)}}",
        "{{with .Name}}a{{else with .}}b{{end}}",
        "{{if .Name}}a{{else if .Name}}b{{else}}c{{end}}",
        r#"{{block "x" .}}a{{end}}"#,
        r#"{{define "x"}}a{{end}}{{define "x"}} {{end}}"#,
        "{{if $x := .Name}}{{$x}}{{else}}{{$x}}{{end}}",
        "{{$x:=1}}{{$x = 2}}{{$x}}",
        "{{range $x,$y := .Labels}}{{$y}}{{end}}",
        "{{range $x , $y := .Labels}}{{end}}",
        "{{007}}",
        "{{1_0}}",
        "{{0x_1}}",
        "{{-3}}",
        "{{print 1 -2}}",
        "{{(.Labels).A}}",
        "{{$.Labels.A}}",
        "{{if(.Name)}}{{end}}",
        "{{if.Name}}{{end}}",
        "{{range.Labels}}{{end}}",
        r#"{{define "x"}}{{end}}{{template "x".Name}}"#,
        "{{1.5e-3}}",
        "{{'a'}}",
    ];

    #[test]
    fn the_spelling_of_an_action_is_as_strict_as_in_go() {
        for source in REFUSED.iter().chain(&NEVER_RUNS) {
            assert!(GoTemplate::parse("t", source, &FIELDS).is_err(), "{source}");
        }
        for source in ACCEPTED {
            let parsed = GoTemplate::parse("t", source, &FIELDS);
            assert_eq!(parsed.map(|_template| ()), Ok(()), "{source}");
        }
    }

    #[test]
    fn deeply_nested_templates_are_refused() {
        assert!(render(&"(".repeat(5000)).is_err());
        assert!(render(&format!("{{{{{}.Name{}}}}}", "(".repeat(1500), ")".repeat(1500))).is_err());
        assert!(render(&"{{if .Name}}".repeat(300)).is_err());
    }
}
