//! Names in task files.

use kv_graders::{Cut, Grader};

#[test]
fn every_name_is_read_back() {
    for grader in Grader::all() {
        assert_eq!(grader.name().parse(), Ok(*grader));
        let json = serde_json::to_string(grader).unwrap();
        assert_eq!(serde_json::from_str::<Grader>(&json).unwrap(), *grader);
    }
    for name in ["f1", "rouge-l", "squad-f1", "choice-longbench-v2", "string-match-all"] {
        assert_eq!(name.parse::<Grader>().unwrap().name(), name);
    }
    assert_eq!("first-line".parse(), Ok(Cut::FirstLine));
}

#[test]
fn an_unknown_name_is_answered_with_the_nearest() {
    let error = "rougel".parse::<Grader>().unwrap_err();
    assert_eq!((error.kind, error.nearest), ("grader", "rouge-l"));
    assert!(error.to_string().contains("did you mean \"rouge-l\"?"), "{error}");
    assert_eq!("Squad_F1".parse::<Grader>().unwrap_err().nearest, "squad-f1");
    assert_eq!("firstline".parse::<Cut>().unwrap_err().nearest, "first-line");
    let error = serde_json::from_str::<Grader>("\"contain\"").unwrap_err();
    assert!(error.to_string().contains("\"contains\""), "{error}");
}

#[test]
fn cuts_take_their_part() {
    let output = "\n\n a b \nsecond\n";
    assert_eq!(Cut::Whole.apply(output), output);
    assert_eq!(Cut::Trimmed.apply(output), "a b \nsecond");
    assert_eq!(Cut::FirstLine.apply(output), " a b ");
    assert_eq!(Cut::TrimmedFirstLine.apply(output), "a b ");
    for cut in [Cut::Whole, Cut::Trimmed, Cut::FirstLine, Cut::TrimmedFirstLine] {
        assert_eq!(cut.apply(""), "");
    }
}
