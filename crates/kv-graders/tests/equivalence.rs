//! Equivalence of answers, beyond what Math-Verify was asked.

use kv_graders::{equivalent, last_boxed};

const MATRIX: &str = r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}";

#[test]
fn these_are_equivalent() {
    for (answer, reference) in [
        ("1/2", r"\dfrac{1}{2}"),
        ("50%", "0.5"),
        (r"12.5\%", "12.5"),
        ("(100, 200)", "(100,200)"),
        ("1,000,000", "10^6"),
        ("x=1 or x=2", "x = 2, x = 1"),
        ("π/2", r"\frac{\pi}{2}"),
        ("sqrt(2)/2", r"\frac{1}{\sqrt 2}"),
        (r"(\tfrac12, \tfrac{\sqrt3}{2})", r"\left(\frac{1}{2}, \frac{\sqrt{3}}{2}\right)"),
        (r"\sqrt[3]{-8}", "-2"),
        (r"x\cos 60^\circ", r"\cos(60)x"),
        (r"2 > x \geq 1", "[1,2)"),
        ("-1 ≤ x", r"[-1, \infty)"),
        (r"x \neq 2", r"2 \ne x"),
        (r"a_{1} + a_2", "a_2 + a_1"),
        (r"\mathrm{Monday}", "Monday"),
        ("{1, 2}", r"\{ 2, 1 \}"),
        (r"\lvert -3 \rvert", "3"),
        (r"\left|x\right|", "|x|"),
        ("0.1\\overline{6}", "1/6"),
        ("15 degrees", "15"),
        (r"\frac{1}{x} + \frac{1}{y}", r"\frac{x+y}{xy}"),
        ("y = -x", "x + y = 0"),
        ("-x > -1", "x < 1"),
        (r"(p, q) = (3, 2)", "(3,2)"),
        (r"AB = 4", "4"),
        (r"11,\! 111,\! 100", "11111100"),
        (r"10\,000", "10,000"),
        ("1 000", "1000"),
        (r"-2 \\le x \\le 7", r"x \in [-2,7]"),
        (r"\left[\begin{array}{cc}1 & 2 \\ 3 & 4\end{array}\right]", MATRIX),
        (r"125\textnormal{ miles}", "125"),
        (r"x \approx 1.5", "3/2"),
        (r"(-1) 2 x", "-2x"),
        (r"\log 100", "2"),
        (r"\lfloor 7/2 \rfloor + \lceil x \rceil", r"3 + \lceil x \rceil"),
        (r"-6/25 \mathrm{~m} / \mathrm{s}^2", "-0.24"),
        (r"1 + \mathrm{e}", "e + 1"),
        (r"((-\infty, 0) \cup (0, 1)) \cup (2, 3)", r"(2,3) \cup (0,1) \cup (-\infty, 0)"),
        (r"-2 \leqslant n \leqslant 4", "[-2,4]"),
    ] {
        assert!(equivalent(answer, reference), "{answer} is not {reference}");
        assert!(equivalent(reference, answer), "{reference} is not {answer}");
    }
}

#[test]
fn these_are_not_equivalent() {
    for (answer, reference) in [
        ("5", "-5"),
        ("0.33", "1/3"),
        ("12345678901234567890", "12345678901234567891"),
        ("(1,2)", "1,2"),
        ("(0,1)", r"\{0,1\}"),
        ("x < 2", "y < 2"),
        ("x < 2", "x > 2"),
        ("x = 2", r"x \ne 2"),
        ("x + 1", "x + 1.001"),
        (r"\sqrt{x^2}", "-x"),
        ("abc", "cba"),
        ("Monday", "Tuesday"),
        (r"\frac{1}{0}", r"\frac{2}{0}"),
        ("10_2", "10_3"),
        (r"2 \pm 1", "3"),
        ("x > 1", "-x > -1"),
        ("2 3", "6"),
        (r"\frac{1}{2} bh", r"\frac{1}{2}"),
        ("no solution", "noo solutin"),
        (r"2\mathrm{e}", "2"),
        (r"\log x", r"\ln x"),
        (r"(p, q) = (3, 2)", "(2,3)"),
        (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ] {
        assert!(!equivalent(answer, reference), "{answer} is {reference}");
        assert!(!equivalent(reference, answer), "{reference} is {answer}");
    }
}

#[test]
fn the_last_box_is_found() {
    assert_eq!(last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}."), Some(r"\frac{1}{2}"));
    assert_eq!(last_boxed(r"\fbox{3}"), Some("3"));
    assert_eq!(last_boxed(r"\boxed {3}"), Some("3"));
    for text in ["", "3", r"\boxed", r"\boxed{", r"\boxed{1", r"\boxed3", r"\boxed}{1}"] {
        assert_eq!(last_boxed(text), None, "{text}");
    }
}
