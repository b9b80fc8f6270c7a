//! Faults of a task are errors; outputs never are.

use kv_graders::{Answer, GradeError, Grader};

#[test]
fn an_answer_without_references_is_refused() {
    for grader in Grader::all() {
        let error = grader.grade("output", &Answer::default()).unwrap_err();
        assert_eq!(error, GradeError::NoReferences { grader: *grader });
    }
}

#[test]
fn missing_classes_are_refused() {
    for grader in [Grader::Classification, Grader::ChoiceGpqaFlexible] {
        let error = grader.grade("output", &Answer::one("(A)")).unwrap_err();
        assert_eq!(error, GradeError::NoClasses { grader });
    }
}

#[test]
fn missing_wrong_answers_are_refused() {
    let error = Grader::TruthfulBleu.grade("output", &Answer::one("Yes.")).unwrap_err();
    assert_eq!(error, GradeError::NoWrong { grader: Grader::TruthfulBleu });
}

#[test]
fn references_of_another_form_are_refused() {
    for (grader, reference) in [
        (Grader::Retrieval, "7"),
        (Grader::Retrieval, "段落7"),
        (Grader::RetrievalZh, "Paragraph 7"),
        (Grader::Choice, "Because"),
        (Grader::Number, "none"),
    ] {
        let error = grader.grade("output", &Answer::one(reference)).unwrap_err();
        assert!(
            matches!(&error, GradeError::Reference { reference: bad, .. } if bad == reference),
            "{error}"
        );
    }
}

#[test]
fn no_output_is_an_error() {
    let outputs = [
        String::new(),
        "\0".to_owned(),
        "(".repeat(100_000),
        format!(r"\boxed{{{}}}", "(".repeat(900)),
        format!(r"\boxed{{{}}}", r"\sqrt".repeat(180)),
        format!(r"\boxed{{{}x}}", r"\sqrt[".repeat(150)),
        format!(r"\boxed{{{}x}}", r"\sin(".repeat(19)),
        format!(r"\boxed{{{}}}", "|x".repeat(400)),
        r"\boxed{9^{9^{9^{9^9}}}}".to_owned(),
        r"\boxed{10000!!!!}".to_owned(),
        r"\boxed{2^{-99999999999999999999}}".to_owned(),
        r"\boxed{\frac{1}{0}}".to_owned(),
        r"\boxed{0^{-1}}".to_owned(),
        r"\boxed{\binom{1000}{500}^{1000}}".to_owned(),
        r"\boxed{é".to_owned(),
        "🙂\u{301}\u{200d}".repeat(1_000),
        "1,".repeat(10_000),
    ];
    let answer = Answer::any(["Paragraph 段落1"]).with_classes(["x", "y"]).with_wrong(["z"]);
    for grader in Grader::all() {
        let answer = match grader {
            Grader::Choice => Answer::one("A"),
            Grader::Boxed => Answer::one("x + 1"),
            Grader::Retrieval => Answer::one("Paragraph 1"),
            _ => answer.clone(),
        };
        for output in &outputs {
            let score = grader.grade(output, &answer).unwrap();
            assert!((0.0..=1.0).contains(&score), "{grader} scored {score}");
        }
    }
}
