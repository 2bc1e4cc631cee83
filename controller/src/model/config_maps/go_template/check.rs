//! Pure: checks for what Go refuses in a template before it runs.
//!
//! gotmpl accepts more than Go does: it stops at a surplus `{{end}}`, and takes the end of the text for a missing one.
//! It looks up functions and fields only when a branch runs. A setting is shared by all services, so an invalid branch
//! must be refused at once, and not when a service first takes it.

use gotmpl::parse::{BranchNode, Expr, ListNode, Node, Parser, PipeNode};

/// Marker after every checked text. No template contains it, so it is parsed last only if the whole text was parsed.
const END: &str = "\u{1}";

/// Functions of Go's text/template.
const FUNCTIONS: [&str; 19] = [
    "and", "call", "eq", "ge", "gt", "html", "index", "js", "le", "len", "lt", "ne", "not", "or",
    "print", "printf", "println", "slice", "urlquery",
];

/// Refuses what Go refuses. `fields` are the fields that dot has at the start.
pub(super) fn check_template(name: &str, source: &str, fields: &[&str]) -> Result<(), String> {
    let wrapped = format!("{source}{END}");
    let parser = Parser::with_name(Some(name), &wrapped, "{{", "}}");
    let parsed = parser.and_then(Parser::parse).map_err(|wrong| wrong.to_string())?;
    let (body, defines) = parsed;
    // gotmpl stops at a surplus `{{end}}` and drops the rest; then the marker is not the last text.
    let last = |it: &Node| matches!(it, Node::Text(text) if text.text.ends_with(END));
    if source.contains(END) || !body.nodes.last().is_some_and(last) {
        return Err(format!("template: {name}: unexpected {{{{end}}}}, or one is missing"));
    }
    let names: Vec<&str> = defines.iter().map(|it| it.name.as_str()).collect();
    let checker = TemplateChecker { name, fields, defines: &names, dollar: DotValue::Start };
    checker.check_list(&body, DotValue::Start)?;
    defines.iter().try_for_each(|it| checker.check_define(&it.body))
}

/// Value of dot at a node of the template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DotValue {
    /// The value with which the whole template is rendered.
    Start,
    /// Another value, whose fields are unknown.
    Unknown,
}

/// Visitor of the parsed template, with the names that exist.
struct TemplateChecker<'a> {
    name: &'a str,
    fields: &'a [&'a str],
    defines: &'a [&'a str],
    /// Value of `$`.
    dollar: DotValue,
}

impl TemplateChecker<'_> {
    fn check_list(&self, list: &ListNode, dot: DotValue) -> Result<(), String> {
        list.nodes.iter().try_for_each(|node| self.check_node(node, dot))
    }

    fn check_node(&self, node: &Node, dot: DotValue) -> Result<(), String> {
        match node {
            Node::List(list) => self.check_list(list, dot),
            Node::Text(_) | Node::Break(_) | Node::Continue(_) => Ok(()),
            Node::Action(action) => self.check_pipe(&action.pipe, dot),
            Node::If(branch) => self.check_branch(branch, dot, dot),
            // `range` and `with` set dot to another value, whose fields are unknown.
            Node::Range(branch) | Node::With(branch) => {
                self.check_branch(branch, dot, DotValue::Unknown)
            }
            Node::Define(define) => self.check_define(&define.body),
            Node::Template(call) if !self.defines.contains(&call.name.as_str()) => {
                Err(format!("template: {}: template {:?} not defined", self.name, call.name))
            }
            Node::Template(call) => {
                call.pipe.as_ref().map_or(Ok(()), |pipe| self.check_pipe(pipe, dot))
            }
        }
    }

    /// Checks a defined template, in which dot and `$` begin as the argument of its call.
    fn check_define(&self, body: &ListNode) -> Result<(), String> {
        TemplateChecker { dollar: DotValue::Unknown, ..*self }.check_list(body, DotValue::Unknown)
    }

    fn check_branch(
        &self,
        branch: &BranchNode,
        dot: DotValue,
        body_dot: DotValue,
    ) -> Result<(), String> {
        self.check_pipe(&branch.pipe, dot)?;
        self.check_list(&branch.body, body_dot)?;
        // In `else` dot is what it was outside.
        branch.else_body.as_ref().map_or(Ok(()), |list| self.check_list(list, dot))
    }

    fn check_pipe(&self, pipe: &PipeNode, dot: DotValue) -> Result<(), String> {
        let args = pipe.commands.iter().flat_map(|command| &command.args);
        args.into_iter().try_for_each(|arg| self.check_expr(arg, dot))
    }

    fn check_expr(&self, expr: &Expr, dot: DotValue) -> Result<(), String> {
        match expr {
            Expr::Identifier(_, function) if !FUNCTIONS.contains(&function.as_str()) => {
                Err(format!("template: {}: function {function:?} not defined", self.name))
            }
            Expr::Field(_, names) if dot == DotValue::Start => {
                self.check_field(names.first().map(|it| it.as_str()))
            }
            // `$` stays what dot was at the start, also within `range` and `with`.
            Expr::Variable(_, variable, names)
                if variable == "$" && self.dollar == DotValue::Start =>
            {
                self.check_field(names.first().map(|it| it.as_str()))
            }
            Expr::Pipe(_, pipe) => self.check_pipe(pipe, dot),
            Expr::Chain(_, inner, _) => self.check_expr(inner, dot),
            Expr::Dot(_)
            | Expr::Field(..)
            | Expr::Variable(..)
            | Expr::Identifier(..)
            | Expr::String(..)
            | Expr::Number(..)
            | Expr::Bool(..)
            | Expr::Nil(_) => Ok(()),
        }
    }

    fn check_field(&self, field: Option<&str>) -> Result<(), String> {
        let Some(field) = field.filter(|it| !self.fields.contains(it)) else { return Ok(()) };
        let field_names: Vec<String> = self.fields.iter().map(|it| format!(".{it}")).collect();
        let (name, field_names) = (self.name, field_names.join(", "));
        Err(format!("template: {name}: can't evaluate field {field}: there are {field_names}"))
    }
}
