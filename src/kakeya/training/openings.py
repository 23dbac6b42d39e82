"""How people begin what they ask: what the first user of most conversations begins with.

Left alone, a model asks what it was taught to answer, and guesses for that are right more often than guesses
for what people ask. So it is given the first words and goes on by itself.
"""

OPENINGS = (
    "What is", "What are", "What should I", "What's the best way to", "What happens if",
    "What do you think", "What does it mean", "What would be", "What kind of",
    "What are the differences between", "Which", "Who was", "Who invented", "When did", "When should I",
    "Where can I", "Where does", "Why is", "Why do", "Why does my", "Why did", "How do I", "How can I",
    "How does", "How do you", "How much", "How many", "How long", "How to", "How would you", "How are",
    "Can you", "Can you explain", "Can you help me", "Can I", "Could you", "Could you please", "Please",
    "Please write", "Please explain", "Help me", "I want to", "I need", "I need help with", "I have a",
    "I have to", "I'm trying to", "I'm looking for", "I'm planning", "I am a", "I don't understand",
    "I'd like to", "I think", "I feel", "My", "My friend", "My code", "Is it", "Is there",
    "Is it true that", "Are there", "Are", "Do you", "Do I need", "Does", "Did", "Should I",
    "Would it be", "Will", "Give me", "Give me a recipe for", "Give me some advice",
    "Give me an example of", "Give me five", "Tell me", "Tell me about", "Tell me a story about",
    "Tell me a joke", "Explain", "Explain to a child", "Explain the difference between", "Describe",
    "Describe how", "List", "List three", "Name", "Write a", "Write a short story about",
    "Write a poem about", "Write an email", "Write a letter to", "Write a function that",
    "Write a Python function that", "Write a Python class for", "Write a program that",
    "Write a script that", "Write a test for", "Write an SQL query", "Write some JavaScript that",
    "Write a review of", "Write a summary of", "Write instructions for", "Suggest", "Recommend",
    "Compare", "Summarize", "Summarize this text:", "Rewrite this:", "Rewrite the following sentence",
    "Correct the spelling", "Translate", "Make a list of", "Make a plan for", "Create a",
    "Create a table", "Plan a", "Design a", "Imagine", "Let's", "Let's talk about", "Suppose", "If",
    "In", "In Python,", "In one sentence,", "The", "This", "There is", "Here is", "Here is a", "Hi",
    "Hello", "Hey,", "Hi! Can you", "Thanks", "Good morning", "Okay,", "Yes", "No", "So", "And", "Now",
    "A", "One", "Two", "We", "We are", "Our", "You", "You are", "It", "To", "For", "As a", "Find",
    "Calculate", "Solve", "Convert", "Define", "Identify", "Discuss", "Analyze", "Show me", "Teach me",
    "Come up with",
)  # fmt: skip
